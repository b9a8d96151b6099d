"""Zero-overhead scheduling for SGLang, as an installable plugin."""

__version__ = "0.1.0"
