"""The only place that knows SGLang's private names and versions."""
