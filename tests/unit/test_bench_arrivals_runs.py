"""scripts/bench_arrivals.py: its client on a real socket, its runs on a made-up server, its flags."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.made_records import MS, records
from zos_sglang.observe.columns import to_columns
from zos_sglang.observe.names import AFTER_IDLE
from zos_sglang.testing.bench import arrivals_cli
from zos_sglang.testing.bench.arrivals import Load, Outcome, Request, figures
from zos_sglang.testing.bench.arrivals_load import Clients, Report, Share, play
from zos_sglang.testing.bench.arrivals_run import NAME, Bench, Plan, open_store
from zos_sglang.testing.bench.arrivals_stream import Answer
from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.bench.zos import Budget

# ------------------------------------------------------------------ the client

STEP_S = 0.02
#: A prompt that starts with this token id is refused.
REFUSED = 99


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one request with tokens 1, 2, 3, ..., one an event; the third and the fourth come at once."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    body = json.loads(await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0])))
    if body["input_ids"][0] == REFUSED:
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull")
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        wanted = body["sampling_params"]["max_new_tokens"]
        for token in range(1, wanted + 1):
            if token != 4:
                await writer.drain()
                await asyncio.sleep(STEP_S)
            finish = {"type": "length", "length": wanted} if token == wanted else None
            event = {
                "output_ids": [token],
                "meta_info": {"finish_reason": finish, "completion_tokens": token},
            }
            _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def streaming_server() -> Iterator[str]:
    """The address of a server that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(_serve, "127.0.0.1", 0), loop)
        server = starting.result(60)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            # In its own thread, as all of a loop but the two calls here.
            loop.call_soon_threadsafe(server.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def test_the_client_times_every_event_and_goes_on_past_a_refusal() -> None:
    asked = [Request(0, 0.0, [1, 2]), Request(1, 0.05, [REFUSED]), Request(2, 0.1, [3])]
    with streaming_server() as url:
        report = play(Share(url, asked, 5, incremental=True, start=time.monotonic() + 0.1, timeout_s=20))
    good, refused, other = report.outcomes
    assert refused.error == "HTTP 503: full"
    assert (good.error, good.tokens, good.events, good.full_events) == (None, 5, 5, 0)
    assert good.digest == other.digest
    # The third and the fourth token came in one segment, or within a moment.
    assert good.ttft >= STEP_S and good.e2e >= 4 * STEP_S
    assert len(good.itl) == 4 and sum(good.itl) == pytest.approx(good.e2e - good.ttft)
    # A loop's timer may ring a millisecond early.
    assert good.late > -0.002 and other.sent - good.sent + good.late > 0.098
    assert report.cpu_s > 0 and report.wall_s > 0.1 and report.lags


def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    share = Share("http://127.0.0.1:9", [Request(0, 0.0, [1])], 5, True, time.monotonic(), 5)
    assert "Connect" in (play(share).outcomes[0].error or "")


def test_several_processes_share_the_requests() -> None:
    with streaming_server() as url, Clients(url, 2, incremental=True, timeout_s=20) as clients:
        load = Load(rate=50, count=5, prompt=3, vocab=50)
        reports = clients.play(load.requests(), 4)
    assert [len(report.outcomes) for report in reports] == [3, 2]
    found = figures([one for report in reports for one in report.outcomes])
    assert (found["requests"], found["failed"], found["tokens"]) == (5, 0, 20)
    assert len(set(found["digests"])) == 1


# ------------------------------------------------------------------ runs


class FakeClient:
    """The server's side of the switch; remembers what was asked, in order."""

    def __init__(self) -> None:
        self.mode = "stock"
        self.calls: list[str] = []
        self.lane = {"steps": 0, "decode_steps": 0, "row_steps": 0, "wasted_row_steps": 0}
        self.steps, self.reported = records(0), 0

    def switch(self, mode: str) -> None:
        self.mode = mode
        self.calls.append(mode)

    def flush(self) -> None:
        self.calls.append("/flush_cache")

    def zos(self) -> dict[str, Any]:
        last = to_columns(self.steps[len(self.steps) - self.reported :])
        steps = {"launches": len(self.steps), "last": last}
        return {"lane": dict(self.lane), "paths": {}, "reasons": {}, "steps": steps}

    def post(self, _path: str, body: dict[str, Any]) -> None:
        self.reported = min(body["server_args"]["zos_report_steps"], len(self.steps))

    def decode(self, count: int, gap_ms: float) -> None:
        """That many decode steps more, so far apart."""
        begun = len(self.steps)
        made = records(count, rows=2, mode=self.mode, cpu=300_000, cpu_forward=100_000)
        made["step"] += begun
        made["t_output"] = (1 + begun + np.arange(count)) * int(gap_ms * MS)
        made["flags"][0] = AFTER_IDLE
        self.steps = np.concatenate([self.steps, made])


class FakeClients:
    """Answers at once, faster in mode resident; `liar` answers differently in that mode."""

    def __init__(self, server: FakeClient, *, liar: bool = False, fails: bool = False) -> None:
        self.server, self.liar, self.fails = server, liar, fails
        self.played: list[tuple[str, list[Request]]] = []

    def play(self, requests: list[Request], output: int) -> list[Report]:
        mode = self.server.mode
        self.played.append((mode, requests))
        itl = 0.001 if mode == "resident" else 0.002
        if mode == "resident":
            for name in ("steps", "decode_steps"):
                self.server.lane[name] += 10
        self.server.decode(10, itl * 1000)
        found = []
        for request in requests:
            one = Outcome(request.index, sent=request.due_s, late=0.0, error="no" if self.fails else None)
            wrong = self.liar and mode == "resident" and request.index == 1
            times = [(request.due_s + itl * (n + 1), 1) for n in range(output)]
            if not self.fails:
                one.fill(Answer(ids=[int(wrong)] * output, events=times))
            found.append(one)
        return [Report(found, cpu_s=0.1, wall_s=1.0, lags=[0.0])]


PLAN = Plan(
    ("stock", "resident"), (Load(4, 3, prompt=2, output=5), Load(16, 3, prompt=2, output=5)), repeats=2
)
HEAD = {
    **{"kind": "bench_arrivals", "settings": {"exact": True, "model": "m", "prompt": 2, "output": 5}},
    **{"commit": "abc", "date": "today", "command": "bench_arrivals.py"},
    **{"versions": {"sglang": "0.5.23"}, "machine": {"cpu": "c", "gpu": None}},
}


def measured(
    tmp_path: Path, budget: Budget | None = None, resume: bool = False, **how: bool
) -> tuple[dict[str, Any], FakeClients]:
    server = FakeClient()
    clients = FakeClients(server, **how)
    bench = Bench(server, clients, budget or Budget(None), lambda _line: None)  # type: ignore[arg-type]
    bench.measure(PLAN, open_store(tmp_path / NAME, dict(HEAD), {}, PLAN, resume=resume))
    return arrivals_cli.load(tmp_path), clients


def test_modes_alternate_and_meet_the_same_requests(tmp_path: Path) -> None:
    data, clients = measured(tmp_path)
    order = [(run["repeat"], run["rate"], run["mode"]) for run in data["runs"]]
    assert order == [
        *((0, 4, "stock"), (0, 4, "resident"), (0, 16, "stock"), (0, 16, "resident")),
        *((1, 4, "resident"), (1, 4, "stock"), (1, 16, "resident"), (1, 16, "stock")),
    ]
    timed = clients.played[2:]
    assert [mode for mode, _ in timed] == [mode for _, _, mode in order]
    assert timed[0][1] == timed[1][1] == timed[4][1] != timed[2][1]
    # The warm-up meets prompts of its own.
    assert clients.played[0][1] != timed[2][1]
    assert data["complete"] and arrivals_cli.exit_code(data) == 0
    row = data["summary"]["rows"][1]
    assert (row["over_stock"]["itl_ms.p50"]["median"], row["lane_share"]) == (0.5, 1.0)
    assert row["targets"]["itl_ms.p50"] is True


def test_each_run_starts_from_an_empty_cache(tmp_path: Path) -> None:
    server = FakeClient()
    bench = Bench(server, FakeClients(server), Budget(None), lambda _line: None)  # type: ignore[arg-type]
    bench.run(PLAN.loads[0], "resident")
    assert server.calls == ["resident", "/flush_cache"]


def test_a_run_has_the_figures_of_its_own_steps(tmp_path: Path) -> None:
    data, clients = measured(tmp_path)
    steps = [run["steps"] for run in data["runs"]]
    assert {one["decode"] for one in steps} == {10}
    assert [one["itl_ms"]["p50"] for one in steps[:2]] == [2, 1]
    # Each answer of `/server_info` would carry all records, at every look at the mode.
    assert clients.server.reported == 0


def test_a_wrong_answer_is_found(tmp_path: Path) -> None:
    data, _ = measured(tmp_path, liar=True)
    answers = {(row["rate"], row["mode"]): row["answers"] for row in data["summary"]["rows"]}
    assert answers[4, "resident"] == {"compared": 6, "differing": 2, "first_requests": [1]}
    assert answers[4, "stock"]["differing"] == 0
    assert arrivals_cli.exit_code(data) == 1


def test_a_warm_up_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="3 requests failed"):
        measured(tmp_path, fails=True)


def test_the_time_limit_keeps_what_there_is(tmp_path: Path) -> None:
    ticks = iter(range(0, 1000, 5))
    data, _ = measured(tmp_path, Budget(40, clock=lambda: float(next(ticks))))
    assert not data["complete"] and 0 < len(data["runs"]) < 8
    assert all(row["repeats"] == 1 for row in data["summary"]["rows"])


def test_an_interrupted_measurement_goes_on_with_the_rates_and_repeats_that_are_missing(
    tmp_path: Path,
) -> None:
    ticks = iter(range(0, 1000, 5))
    before, _ = measured(tmp_path, Budget(40, clock=lambda: float(next(ticks))))
    data, clients = measured(tmp_path, resume=True)
    assert data["complete"] and data["runs"][: len(before["runs"])] == before["runs"]
    runs = {(run["repeat"], run["rate"], run["mode"]) for run in data["runs"]}
    assert len(runs) == len(data["runs"]) == 8
    assert len(clients.played) == 2 + 8 - len(before["runs"])  # warm-ups anew
    _, clients = measured(tmp_path, resume=True)
    assert not clients.played


# ------------------------------------------------------------------ flags


def test_the_defaults_are_those_of_the_issue() -> None:
    args = arrivals_cli.parser().parse_args([])
    assert (args.modes, args.rates) == (("stock", "resident"), (4, 16, 64))
    assert (args.prompt, args.output, args.requests, args.seconds) == (256, 256, 200, 20)


@pytest.mark.parametrize(
    "flags",
    [["--rates", "0"], ["--rates", "a"], ["--modes", "stock"], ["--modes", "stock,off"], ["--in", "0"]],
)
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arrivals_cli.parser().parse_args(flags)
    assert flags[0] in capsys.readouterr().err


def test_a_result_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / NAME).write_text("{}")
    assert arrivals_cli.main(["--out", str(tmp_path)]) == 2
    assert "another --out" in capsys.readouterr().err
    assert arrivals_cli.main(["--plot-only", str(tmp_path)]) == 2
    assert "not a result" in capsys.readouterr().err
