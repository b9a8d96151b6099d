"""`ZOS_TRACE` on a real server: whole while it runs and however it ends; its report in a browser."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from tests.browser import opened, rows_of_colour
from tests.unit.trace_case import check_well_formed, instants, on
from zos_sglang.__main__ import main
from zos_sglang.observe.names import LANE_OPENING, code
from zos_sglang.observe.summary import summarise
from zos_sglang.observe.tools import report_page
from zos_sglang.observe.trace_reader import Trace, read

pytestmark = pytest.mark.server

#: Tokens of answers that are still under way when their server is ended.
LONG = 3000


def whole(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that is being written. Who reads in the middle of a write may see half of it, and
    on a busy machine the writer may have to wait for its second half."""
    deadline = time.monotonic() + 5
    while True:
        try:
            events: list[dict[str, Any]] = json.loads(path.read_text())
            return events
        except ValueError:
            if time.monotonic() > deadline:
                pytest.fail(f"{path} is not JSON")
            time.sleep(0.01)


def settled(client: Any, path: Path) -> Trace:
    """The trace of an idle server, once every launch is in it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        launches = client.zos()["steps"]["launches"]
        found = read(path)
        if len(found.records) == launches:
            return found
        time.sleep(0.2)
    pytest.fail(f"{launches} launches, {len(found.records)} steps in the trace")


def until_steps(path: Path, count: int) -> None:
    """Wait until the trace of a busy server holds so many steps."""
    deadline = time.monotonic() + 60
    while (found := len(read(path).records)) < count:
        assert time.monotonic() < deadline, f"{found} steps in the trace"
        time.sleep(0.05)


def test_a_trace_is_whole_while_the_server_runs_and_after_it_ends(serve, client_of, tmp_path):
    path, page = tmp_path / "trace.json", tmp_path / "report.html"
    server = serve("resident", {"ZOS_TRACE": str(path)})
    client = client_of(server)

    # While it runs: read it all the time.
    reads = 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.wave)
        while not running.done():
            whole(path)
            reads += 1
        running.result()
    assert reads > 10
    for mode in ("overlap", "sync"):
        assert client.set_state(zos_mode=mode).json() == [True]
        client.wave(6)
    found = settled(client, path)
    assert not found.ended
    assert found.notes == []
    assert found.records["step"].tolist() == list(range(1, len(found.records) + 1))

    # What it says is what the server says.
    events = whole(path)
    check_well_formed(events)
    block = client.zos()
    summary = summarise(found.records)
    assert {"resident", "overlap", "sync"} <= summary["paths"].keys()
    assert set(summary["modes"]) == {"resident", "overlap", "sync"}
    for reason, count in block["reasons"].items():
        assert np.count_nonzero(found.records["reason"] == code("reason", reason)) == count, reason
    steps = len(found.records)
    assert len(on(events, "schedule")) == len(on(events, "processing")) == steps
    assert len(on(events, "forward")) == len(on(events, "copy")) == steps
    assert {one["args"]["from"] for one in on(events, "forward")} == {"call"}
    named = instants(events)
    assert {"mode resident", "mode overlap", "mode sync", "launch: mode-sync", "lane opens"} <= set(named)
    assert named.count("lane opens") == int(np.count_nonzero(found.records["flags"] & LANE_OPENING))
    assert sum(name.startswith("lane left: ") for name in named) == sum(summary["departures"].values()) > 0

    # After SIGTERM.
    server._process.send_signal(signal.SIGTERM)
    assert server._process.wait(timeout=90) == 0
    ended = read(path)
    assert ended.ended
    assert ended.notes == []
    assert len(ended.records) >= steps
    check_well_formed(json.loads(path.read_text()))

    # Its report, looked at.
    assert main(["report", str(path), "-o", str(page)]) == 0
    with opened(page) as seen:
        assert seen.complaints == []
        assert seen.requests == [page.as_uri()]
        seen.page.screenshot(path=str(tmp_path / "report.png"), full_page=True)
        lines = [rows_of_colour(seen.picture("#timeline"), colour) for colour in report_page.COLOURS.values()]
        assert all(lines), "every track has slices in its colour"
        assert [mean(one) for one in lines] == sorted(mean(one) for one in lines)
        reasons = {row[0]: int(row[1].replace(",", "")) for row in seen.cells("reasons")}
        assert reasons["mode-sync"] == block["reasons"]["mode-sync"]
        assert sum(reasons.values()) == len(ended.records)
        assert len(seen.cells("signs")) == 4
        # On a CPU nothing can overlap, and the page does not claim that it did.
        assert {row[4] for row in seen.cells("signs")} == {"cannot tell"}
        assert "nothing can overlap" in seen.page.inner_text("header")


def test_a_killed_server_leaves_a_trace_that_can_be_read(serve, client_of, tmp_path, capsys):
    path = tmp_path / "trace.json"
    server = serve("overlap", {"ZOS_TRACE": str(path)})
    client = client_of(server)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(client.generate, f"long {n}", LONG) for n in range(4)]
        until_steps(path, 60)
        server.stop()
        for one in running:
            assert one.exception() is not None
    check_well_formed(json.loads(path.read_text()))
    found = read(path)
    assert not found.ended
    assert len(found.records) >= 60
    assert found.records["step"].tolist() == list(range(1, len(found.records) + 1))
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] is False


def test_a_scheduler_that_is_terminated_writes_what_it_has(serve, client_of, tmp_path):
    """Not the way SGLang ends it, but the way a person or a cluster may: SIGTERM to the process itself."""
    path = tmp_path / "trace.json"
    client = client_of(serve("overlap", {"ZOS_TRACE": str(path)}))
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(client.generate, f"long {n}", LONG) for n in range(4)]
        until_steps(path, 60)
        (scheduler,) = {event["pid"] for event in whole(path)}
        os.kill(scheduler, signal.SIGTERM)
        for one in running:
            assert one.exception() is not None
    found = read(path)
    assert found.ended
    assert found.notes == []
    assert found.records["step"].tolist() == list(range(1, len(found.records) + 1))
    check_well_formed(json.loads(path.read_text()))
