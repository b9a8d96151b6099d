"""Real servers over HTTP on the CPU, on a tiny random model."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from zos_sglang.testing.models import make_tiny
from zos_sglang.testing.server import ServerProcess

CACHE = Path(__file__).parents[2] / ".cache"

#: SGLang's own checks: leak check on every step, consume-once check of the future map.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_IS_IN_CI": "1"}


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return make_tiny("qwen3", CACHE / "tiny-qwen3")


@pytest.fixture(scope="module")
def serve(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers that live as long as the test module."""
    started: list[ServerProcess] = []

    def start(
        mode: str | None,
        env: dict[str, str] | None = None,
        args: tuple[str, ...] = (),
        model: Path = tiny_model,
    ) -> ServerProcess:
        log = tmp_path_factory.mktemp("server") / "server.log"
        server = ServerProcess(model, mode=mode, env=env or {}, args=args, log=log)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


def entry_points(module: str) -> str:
    """An entry_points.txt that names `module`'s `register` as a plugin of the module's first word."""
    return f"[sglang.srt.plugins]\n{module.split('_', maxsplit=1)[0]} = {module}:register\n"


class Client:
    """A user of one server."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=300, trust_env=False)

    def generate(self, text: str, max_new_tokens: int = 24, **more: Any) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"text": text, "sampling_params": params, **more}
        answer = self.http.post("/generate", json=body)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def wave(self, requests: int = 12) -> list[str]:
        """Answers of concurrent requests of different lengths, in the order asked."""
        with ThreadPoolExecutor(requests) as pool:
            answers = pool.map(lambda i: self.generate(f"request {i}", 8 + 3 * i), range(requests))
            return [answer["text"] for answer in answers]

    def set_state(self, **values: Any) -> httpx.Response:
        return self.http.post("/set_internal_state", json={"server_args": values})

    def zos(self) -> dict[str, Any] | None:
        """Our block of /server_info, or None where the plugin is not there."""
        state = self.http.get("/server_info").json()["internal_states"][0]
        block: dict[str, Any] | None = state.get("zos")
        return block

    def settled(self) -> dict[str, Any]:
        """Our block of a server without requests, with all its steps processed.

        An answer can be here before the step behind it, launched in vain, is processed: by the iteration that
        takes in the first question, at the latest.
        """
        assert self.zos() is not None
        block = self.zos()
        assert block is not None
        return block


@pytest.fixture(scope="session")
def client_of() -> type[Client]:
    return Client
