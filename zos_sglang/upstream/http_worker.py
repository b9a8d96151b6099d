"""SGLang's HTTP app with our middleware, for tokenizer workers, which import it by this path."""

from sglang.srt.entrypoints.http_server import app

from zos_sglang.upstream.http import install

install(app)

__all__ = ["app"]
