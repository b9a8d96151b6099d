"""Aborts in a real server, in every mode: one last record, nothing behind it, pages back in two steps.

The scheduler's own account (`zos_sglang.testing.scheduler_watch`) says when an abort was accepted, what was
sent afterwards, and when the slots came back. Stock is held to the same sentences, in the same server.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import STRICT
from zos_sglang.testing import scheduler_watch
from zos_sglang.testing.compare.client import Client
from zos_sglang.testing.compare.prompts import ModelInfo
from zos_sglang.testing.compare.records import Record
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.soak.judge import IN_CHUNKS

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

MODES = ("stock", "overlap", "resident")
RUNNING = 8
ARGS = (
    *("--max-running-requests", str(RUNNING), "--chunked-prefill-size", "64"),
    *("--max-total-tokens", "40000"),
)
#: Far enough apart, and from what other requests need, for a machine that is three times as slow.
WAITING_S, RUNNING_S = 4.0, 8.0
LIMITS = {
    "SGLANG_REQ_WAITING_TIMEOUT": str(WAITING_S),
    "SGLANG_REQ_RUNNING_TIMEOUT": str(RUNNING_S),
    # How often a request that is not streamed looks whether its client is still there.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
}
#: Longer than any limit above.
LONG = 3900
#: For what comes soon on any machine, seconds.
LIMIT_S = 60
TWO_STEPS = 2


class Watched:
    """The server, the model, and the account since the last `forget`."""

    def __init__(self, server: Any, model: Path, account: Path) -> None:
        self.server, self.model, self.account = server, ModelInfo(model), account
        self._read = 0
        self.turn = 0

    def play(self, mode: str, scenario: Callable[[Client], Awaitable[Any]]) -> list[dict[str, Any]]:
        """Run a scenario in a mode, up to an idle server without a page missing; returns the account."""

        async def run() -> None:
            self.turn += 1
            client = Client(self.server.url, scenario=f"abort{self.turn}")
            try:
                await client.must("/set_internal_state", {"server_args": {"zos_mode": mode}})
                await scenario(client)
                assert await client.flush() is None
                zos = await client.zos()
                assert zos is not None and zos["lane"]["faults"] == zos["paths"]["fallbacks"] == 0
                faults = {name: r.faults for name, r in client.records.items() if r.faults}
                assert not faults
            finally:
                await client.close()

        self._read = self.account.stat().st_size if self.account.exists() else 0
        asyncio.run(run())
        return self.so_far()

    def so_far(self) -> list[dict[str, Any]]:
        """The account since the scenario began."""
        with self.account.open() as lines:
            lines.seek(self._read)
            return [json.loads(line) for line in lines if line.endswith("\n")]

    async def arrived(self, client: Client, *names: str) -> None:
        """Wait until the scheduler has these requests, running or not."""
        wanted, deadline = {client.rid(name) for name in names}, time.monotonic() + LIMIT_S
        while not wanted <= {e["rid"] for e in self.so_far() if e["event"] == "asked"}:
            assert time.monotonic() < deadline, f"{names} did not arrive"
            await asyncio.sleep(0.02)

    def ids(self, tokens: int, seed: int) -> list[int]:
        return self.model.ids(tokens, 7000 + seed)

    def ask(
        self, client: Client, name: str, tokens: int, *, stream: bool = False, prompt: int = 9
    ) -> asyncio.Task[Record]:
        """A greedy request on its way; its prompt follows from its name."""
        ids = self.ids(prompt, zlib.crc32(name.encode()) % 5000)
        return asyncio.create_task(client.generate(name, ids, greedy(tokens), stream=stream))


@pytest.fixture(scope="module")
def watched(serve, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scheduler_watch")
    account = folder / "account.jsonl"
    plugin = distribution(folder, "scheduler_watch", "1.0", scheduler_watch.ENTRY)
    env = {**STRICT, **LIMITS, **plugin, scheduler_watch.FILE: str(account)}
    return Watched(serve("resident", env, ARGS), tiny_model, account)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def greedy(tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more}


# ---------------------------------------------------------------- what must hold of every abort


def aborted(account: list[dict[str, Any]], kind: str = "running") -> dict[str, int]:
    """Requests of a kind that aborts met, each with the line of the first one."""
    found: dict[str, int] = {}
    for line, entry in enumerate(account):
        if entry["event"] == "abort":
            for rid in entry[kind]:
                found.setdefault(rid, line)
    return found


def last_words(account: list[dict[str, Any]], rid: str, since: int = 0) -> list[dict[str, Any]]:
    """All records of a request that left for the client, from line `since` on."""
    return [e for e in account[since:] if e["event"] in ("out", "echo") and e.get("rid") == rid]


def prefills(account: list[dict[str, Any]]) -> int:
    """At most so many prefills of others ran meanwhile, in which no running request takes part: each of their
    results publishes a load."""
    return sum(entry["event"] == "load" for entry in account)


def holds(account: list[dict[str, Any]], least: int = 1) -> dict[str, dict[str, Any]]:
    """Of every request that an abort met: one last record, none behind it, slots back within two steps.

    Returns the last records by request id; at least `least` of them.
    """
    ends = {}
    for kind in ("running", "waiting"):
        for rid, line in aborted(account, kind).items():
            said = last_words(account, rid, line)
            assert len(said) == 1, f"{rid}, {kind}: {said}"
            assert said[0]["event"] == "echo" or said[0]["finish"] == "abort", said
            ends[rid] = said[0]
            freed = [i for i, e in enumerate(account) if e["event"] == "free" and e["rid"] == rid]
            if kind == "running":
                assert len(freed) == 1, f"{rid}: slots released {len(freed)} times"
                own_steps = account[freed[0]]["step"] - account[line]["step"]
                own_steps -= prefills(account[line : freed[0]])
                assert own_steps <= TWO_STEPS, rid
            else:
                assert said[0]["event"] == "echo" and not freed, f"{rid} waited and still ran"
    finishes = [e["rid"] for e in account if e["event"] == "echo" or (e["event"] == "out" and e["finish"])]
    assert len(finishes) == len(set(finishes)), "a request has two finishes"
    assert len(ends) >= least
    return ends


# ---------------------------------------------------------------- by request id


def test_an_abort_lets_out_only_what_was_in_flight(watched, mode):
    depths = (0, 1, 7, 40, 200)

    async def scenario(client: Client) -> None:
        others = [client.generate(f"stay-{i}", watched.ids(9, i), greedy(60), stream=True) for i in range(3)]
        cut = [
            client.generate(f"at-{n}-x", watched.ids(8 + n % 9, 50 + n), greedy(LONG), stream=True)
            for n in depths
        ]
        grammar = {"temperature": 0, "max_new_tokens": LONG, "regex": "[a-d]{200,300}"}
        spelt = client.generate("at-12-g", watched.ids(9, 90), grammar, stream=True)
        *records, masked = await asyncio.gather(*cut, *others, spelt)
        assert (masked.finish_type, masked.tokens) == ("abort", 13)
        assert [r.finish_type for r in records] == ["abort"] * len(depths) + ["length"] * 3
        # One token was on its way, as in stock; it stands in the last record.
        assert [r.tokens for r in records[: len(depths)]] == [n + 1 for n in depths]

    ends = holds(watched.play(mode, scenario), least=len(depths) + 1)
    assert all(end["event"] == "out" for end in ends.values())


def test_a_request_that_ends_in_the_step_of_its_abort_ends_once(watched, mode):
    depths = (0, 1, 7, 40)

    async def scenario(client: Client) -> None:
        cut = [
            # The token in flight is the last one that it may have.
            client.generate(f"at-{n}-x", watched.ids(8, 100 + n), greedy(n + 1), stream=n % 2 == 0)
            for n in depths
        ]
        records = await asyncio.gather(*cut, client.generate("stay", watched.ids(9, 120), greedy(60)))
        assert [r.finish_type for r in records] == ["abort"] * len(depths) + ["length"]
        assert [r.tokens for r in records] == [*(n + 1 for n in depths), 60]

    account = watched.play(mode, scenario)
    holds(account, least=len(depths))


def test_the_pool_is_empty_two_steps_after_the_only_request_was_aborted(watched, mode):
    async def scenario(client: Client) -> None:
        record = await client.generate("at-100-x", watched.ids(20, 140), greedy(LONG))
        assert record.finish_type == "abort"
        await client.zos()  # one more intake

    account = watched.play(mode, scenario)
    (line,) = aborted(account).values()
    looks = [e for e in account[line:] if e["event"] == "used"]
    back = next(e["step"] for e in looks if e["used"] == 0)
    assert back - account[line]["step"] <= TWO_STEPS


def test_who_waits_is_aborted_without_ever_running(watched, mode):
    async def scenario(client: Client) -> None:
        busy = [watched.ask(client, f"busy-{i}", LONG, stream=True) for i in range(RUNNING)]
        await started(client, *(f"busy-{i}" for i in range(RUNNING)))
        late = [watched.ask(client, f"late-{i}", 8, stream=i > 0) for i in range(2)]
        await watched.arrived(client, "late-0", "late-1")
        await client.control("/abort_request", {"rid": client.rid("late")})
        # Only whole ids are known to the front end; SGLang's scheduler takes the start of one.
        for i in range(2):
            await client.control("/abort_request", {"rid": client.rid(f"late-{i}")})
        for record in await asyncio.gather(*late):
            assert record.finish_type == "abort" and not record.tokens and not record.text
        await client.control("/abort_request", {"abort_all": True})
        await asyncio.gather(*busy)

    account = watched.play(mode, scenario)
    holds(account, least=RUNNING + 2)
    assert len(aborted(account, "waiting")) == 2


# ---------------------------------------------------------------- all at once, clients, clocks, sessions


def test_abort_all_meets_those_who_run_those_in_chunks_and_those_who_wait(watched, mode):
    async def scenario(client: Client) -> None:
        sizes = [9, 14, 18, 22, 26, 30, 12]
        asked = [
            watched.ask(client, f"run-{i}", LONG, stream=i % 2 == 0, prompt=size)
            for i, size in enumerate(sizes)
        ]
        await started(client, *(f"run-{i}" for i in range(0, len(sizes), 2)))
        # Should it be through its chunks by then, it still runs.
        asked.append(watched.ask(client, "chunks", 400, prompt=3600))
        await watched.arrived(client, "chunks")
        asked += [watched.ask(client, f"late-{i}", LONG, stream=i == 0) for i in range(4)]
        await watched.arrived(client, *(f"late-{i}" for i in range(4)))
        await client.control("/abort_request", {"abort_all": True})
        for record in await asyncio.gather(*asked):
            assert record.finish_type == "abort", record.name

    holds(watched.play(mode, scenario), least=12)


def test_a_client_that_hangs_up_is_aborted_like_any_other(watched, mode):
    async def scenario(client: Client) -> None:
        async def leave(name: str, stream: bool, **more: Any) -> None:
            body = {
                "rid": client.rid(name),
                "input_ids": watched.ids(9, 300 + len(name)),
                "sampling_params": greedy(LONG, **more),
                "stream": stream,
            }
            with pytest.raises(httpx.ReadTimeout):
                patience = httpx.Timeout(60, read=0.3)
                async with client.http.stream("POST", "/generate", json=body, timeout=patience) as answer:
                    begun = time.monotonic()
                    async for _ in answer.aiter_lines():
                        if time.monotonic() - begun > 0.2:
                            raise httpx.ReadTimeout("enough")

        await asyncio.gather(
            client.generate("stay", watched.ids(9, 330), greedy(400), stream=True),
            leave("streamed", True),
            leave("whole", False),
            leave("copies", False, n=4),
        )

    account = watched.play(mode, scenario)
    holds(account, least=6)


def test_a_request_over_its_time_is_aborted_running_or_waiting(watched, mode):
    async def scenario(client: Client) -> None:
        asked = [watched.ask(client, f"run-{i}", LONG, stream=i < 2) for i in range(RUNNING)]
        await started(client, "run-0", "run-1")
        await watched.arrived(client, *(f"run-{i}" for i in range(RUNNING)))
        late = [watched.ask(client, f"late-{i}", 8, stream=i == 0) for i in range(2)]
        records = await asyncio.gather(*asked, *late)
        for record in records:
            assert "timeout reached" in f"{record.finish} {record.error}", record.name
        assert [r.status for r in records[-2:]] == [200, 503]  # streamed: the status stands in the record

    account = watched.play(mode, scenario)
    holds(account, least=RUNNING + 2)
    assert len(aborted(account, "waiting")) == 2


def test_a_time_limit_that_meets_a_prompt_between_two_chunks_is_told_like_a_clients_abort(watched, mode):
    """Upstream's `process_pending_chunked_abort` forgets whose abort it was: the soak's judge knows."""

    async def scenario(client: Client) -> None:
        chunked = watched.ask(client, "chunked", 20, prompt=LONG)
        await watched.arrived(client, "chunked")
        await client.must("/pause_generation", {"mode": "in_place"})
        await asyncio.sleep(RUNNING_S + 1)
        await client.must("/continue_generation", {})
        record = await chunked
        assert record.finish == {"type": "abort", "message": IN_CHUNKS}, (record.finish, record.error)

    watched.play(mode, scenario)


def test_a_request_of_a_session_is_aborted_and_the_session_goes_on(watched, mode):
    async def scenario(client: Client) -> None:
        reply = await client.control("/open_session", {"capacity_of_str_len": 10_000})
        session = reply.json()
        turn = {"session_params": {"id": session}}
        first = await client.generate("first", watched.ids(12, 500), greedy(16), **turn)
        turn["session_params"]["rid"] = client.rid("first")
        cut, beside = await asyncio.gather(
            client.generate("at-20-x", watched.ids(8, 501), greedy(LONG), stream=True, **turn),
            client.generate("beside", watched.ids(8, 502), greedy(60)),
        )
        assert (first.finish_type, beside.finish_type) == ("length", "length")
        assert (cut.finish_type, cut.tokens) == ("abort", 21)
        again = await client.generate("again", watched.ids(8, 503), greedy(16), **turn)
        assert again.finish_type == "length" and again.tokens == 16
        assert (await client.control("/close_session", {"session_id": session})).status_code == 200

    holds(watched.play(mode, scenario))


def test_aborted_answers_are_the_starts_of_those_of_stock(watched):
    def answers(mode: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}

        async def scenario(client: Client) -> None:
            cut = [
                client.generate(f"at-{n}-x", watched.ids(10, 600 + n), greedy(LONG), stream=True)
                for n in (3, 30, 150)
            ]
            for record in await asyncio.gather(*cut):
                found[record.name] = record.token_ids or []

        holds(watched.play(mode, scenario), least=3)
        return found

    stock = answers("stock")
    assert [len(ids) for ids in stock.values()] == [4, 31, 151]
    assert answers("overlap") == stock
    assert answers("resident") == stock


async def started(client: Client, *names: str) -> None:
    """Wait until streams have brought something; requests that are not streamed are not waited for."""
    deadline = time.monotonic() + LIMIT_S
    while not all((r := client.records.get(name)) is not None and r.boundaries for name in names):
        assert time.monotonic() < deadline, f"not all of {names} have begun"
        await asyncio.sleep(0.01)
