"""A prefill server, a decode server and a balancer on this machine, as one context manager."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx

from zos_sglang.testing.server import (
    HOST,
    ServerFailed,
    ServerProcess,
    cpu_env,
    dying_with_us,
    free_port,
)

Role = Literal["prefill", "decode"]

#: The package `mooncake` of tests, see `transfer/mooncake/engine.py`.
TRANSFER = Path(__file__).parent / "transfer"


def role_args(role: Role, bootstrap_port: int) -> list[str]:
    """SGLang flags of one role."""
    flags = [
        *("--disaggregation-mode", role),
        *("--disaggregation-transfer-backend", "mooncake"),
        *("--disaggregation-bootstrap-port", str(bootstrap_port)),
    ]
    if role == "decode":
        # The pool that is the default pins its memory, which needs a CUDA driver.
        flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return flags


def transfer_env(real: bool = False) -> dict[str, str]:
    """Environment of a server: KV over TCP, by our stand-in, or with `real` by the installed mooncake."""
    stand_in = {} if real else {"PYTHONPATH": os.pathsep.join([str(TRANSFER), cpu_env()["PYTHONPATH"]])}
    return {
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_FORCE_TCP": "1",
        "SGLANG_HOST_IP": HOST,
        # SGLang takes for granted that a worker's threads may be many; these are small machines.
        "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE": "2",
        "SGLANG_DISAGGREGATION_QUEUE_SIZE": "2",
        **stand_in,
    }


class Disaggregated:
    """Both servers and their balancer; a context manager. `url` is the balancer's.

    Args:
        model: path of the model.
        modes: of the prefill and of the decode server; None is stock.
        args: flags of both servers.
        env: environment of both.
        folder: where the logs go.
        more, more_env: flags and variables of one role, after those of both.
        real: the installed mooncake moves the memory, not our stand-in.
    """

    def __init__(
        self,
        model: str | Path,
        modes: tuple[str | None, str | None],
        *,
        folder: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        more: Mapping[Role, Sequence[str]] | None = None,
        more_env: Mapping[Role, Mapping[str, str]] | None = None,
        real: bool = False,
    ) -> None:
        self.bootstrap_port = free_port()
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.folder = folder
        roles: tuple[Role, Role] = ("prefill", "decode")
        self.servers: dict[Role, ServerProcess] = {
            role: ServerProcess(
                model,
                mode=mode,
                args=[*role_args(role, self.bootstrap_port), *args, *(more or {}).get(role, ())],
                env={**transfer_env(real), **(env or {}), **(more_env or {}).get(role, {})},
                log=folder / f"{role}.log",
            )
            for role, mode in zip(roles, modes, strict=True)
        }
        self._balancer: subprocess.Popen[bytes] | None = None

    @property
    def prefill(self) -> ServerProcess:
        return self.servers["prefill"]

    @property
    def decode(self) -> ServerProcess:
        return self.servers["decode"]

    def zos(self, role: Role) -> dict[str, Any]:
        """Our block of a server's state."""
        with httpx.Client(timeout=60, trust_env=False) as client:
            state = client.get(f"{self.servers[role].url}/server_info").json()
        block: dict[str, Any] = state["internal_states"][0]["zos"]
        return block

    def start(self) -> None:
        """Start all three and wait until a request has gone through. Raises ServerFailed."""
        try:
            for server in self.servers.values():
                server.launch()
            for server in self.servers.values():
                server.start()
            self._start_balancer()
        except BaseException:
            self.stop()
            raise

    def _start_balancer(self) -> None:
        command = [*dying_with_us(), sys.executable, "-m", "zos_sglang.testing.balancer"]
        command += ["--port", str(self.port)]
        command += ["--prefill", self.prefill.url, "--decode", self.decode.url]
        command += ["--bootstrap-port", str(self.bootstrap_port)]
        with (self.folder / "balancer.log").open("wb") as sink:
            self._balancer = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        with httpx.Client(timeout=5, trust_env=False) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(0.1)
        raise ServerFailed(f"the balancer is not ready after 60 s; see {self.folder / 'balancer.log'}")

    def stop(self, grace_s: float = 0) -> None:
        if self._balancer is not None:
            self._balancer.kill()
            self._balancer.wait()
            self._balancer = None
        for server in self.servers.values():
            server.stop(grace_s)

    def __enter__(self) -> Disaggregated:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
