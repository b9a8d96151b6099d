"""One server of ours as the benchmark sees it: waves of one batch, the live switch, its step records."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from zos_sglang.observe.record import KEPT

_SWITCH_TIMEOUT_S = 30.0
#: Ids below this are special tokens in some vocabularies.
_FIRST_ID = 8


class BenchError(RuntimeError):
    """The server did not do what the benchmark asked; the message says what and how to go on."""


@dataclass(frozen=True)
class Wave:
    """The answers to one batch.

    `ids` are the output token ids by request, `seconds` the wall time of the HTTP call.
    """

    ids: list[list[int]]
    seconds: float

    @property
    def digest(self) -> str:
        """SHA-256 over all output token ids in the order of the requests."""
        return hashlib.sha256(json.dumps(self.ids, separators=(",", ":")).encode()).hexdigest()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def prompts(batch: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`batch` random prompts of `length` token ids below `vocab`; the same ones for the same arguments."""
    source = random.Random(f"{seed}/{batch}/{length}")
    return [[source.randrange(_FIRST_ID, vocab) for _ in range(length)] for _ in range(batch)]


class BenchClient:
    """Talks to one server that records its steps. A context manager."""

    def __init__(self, url: str, timeout_s: float = 300) -> None:
        self.http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> BenchClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer of a POST. Raises BenchError on any status but 200."""
        reply = self.http.post(path, json=body)
        if reply.status_code != 200:
            raise BenchError(f"{path} answered {reply.status_code}: {reply.text[:500]}")
        return reply.json()

    def info(self) -> dict[str, Any]:
        """`/server_info`."""
        reply = self.http.get("/server_info")
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def zos(self) -> dict[str, Any]:
        """Our block of `/server_info`. Raises BenchError if the plugin is not at work."""
        block = self.info()["internal_states"][0].get("zos")
        if block is None:
            raise BenchError("the server reports no block 'zos': the plugin is inactive, see its log")
        return dict(block)

    def request(self, mode: str) -> None:
        """Ask for a mode; it takes effect at the next step boundary. Raises BenchError if refused."""
        self.post("/set_internal_state", {"server_args": {"zos_mode": mode}})

    def switch(self, mode: str) -> None:
        """Change the mode and wait until it is in effect. Raises BenchError."""
        self.request(mode)
        deadline = time.monotonic() + _SWITCH_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.zos()["mode"] == mode:
                return
            time.sleep(0.01)
        raise BenchError(f"mode {mode} was not in effect {_SWITCH_TIMEOUT_S:.0f} s after the switch")

    def set_rule(self, rule: str) -> None:
        """Change the consecutive-prefill rule, for launches from here on. Raises BenchError if refused."""
        self.post("/set_internal_state", {"server_args": {"zos_consecutive_prefill": rule}})

    def reset_records(self) -> None:
        """Forget all step records; those that follow have details and come with `zos`. Raises BenchError."""
        wanted = {"zos_record_reset": 1, "zos_record_detail": 1, "zos_report_steps": KEPT}
        answer = self.post("/set_internal_state", {"server_args": wanted})
        if isinstance(answer, list) and False in answer:
            raise BenchError("the server records no steps; start it with ZOS_RECORD=1, see its log")

    def flush(self) -> None:
        """Empty the prefix cache, once nothing runs. Raises BenchError."""
        flushed = self.http.post("/flush_cache", params={"timeout": 10})
        if flushed.status_code != 200:
            raise BenchError(f"/flush_cache answered {flushed.status_code}: {flushed.text[:300]}")

    def wave(
        self,
        input_ids: list[list[int]],
        output_tokens: int,
        more: Sequence[Mapping[str, Any]] | None = None,
        *,
        flush: bool = True,
    ) -> Wave:
        """Generate greedily for all prompts at once, from an empty prefix cache (`flush`).

        One call carries them all: the scheduler takes them in with one message, prefills them as one
        batch and decodes them as one batch, so the arithmetic of every wave is the same. `more` are further
        sampling parameters, one a prompt.
        """
        if flush:
            self.flush()
        common = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        body = {
            "input_ids": input_ids,
            "sampling_params": common if more is None else [{**common, **extra} for extra in more],
        }
        start = time.perf_counter()
        answers = self.post("/generate", body)
        seconds = time.perf_counter() - start
        ids = [list(answer["output_ids"]) for answer in answers]
        short = [len(found) for found in ids if len(found) != output_tokens]
        if short:
            raise BenchError(f"{len(short)} answers have not {output_tokens} tokens but {short[:5]}")
        return Wave(ids, seconds)
