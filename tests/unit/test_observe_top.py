"""`top`: what a frame holds, and what it looks like."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.unit.made_records import records, steady
from tests.unit.observed_server import info_of, served
from zos_sglang import __main__ as cli
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.names import AFTER_IDLE
from zos_sglang.observe.remote import Server
from zos_sglang.observe.tools import top
from zos_sglang.observe.tools.text import microseconds, share
from zos_sglang.observe.tools.top_view import _track, view
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Departure


def server_of(made: np.ndarray, **more: Any) -> Server:
    info = info_of(made, **more)
    zos = info["internal_states"][0]["zos"]
    return Server("http://there", info, zos, zos["steps"], 1)


def drawn(frame: dict[str, Any], width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(view(frame, width))
    return out.getvalue()


# ---------------------------------------------------------------- numbers


def test_throughput_of_one_frame_is_that_of_the_busy_steps() -> None:
    made = steady(64, gpu=10, cpu=4)
    made["t_launch"][32:] += 5_000_000_000
    made["flags"][32] = AFTER_IDLE
    flow = top.measure(server_of(made))["throughput"]
    assert (flow["steps_per_s"], flow["tokens_per_s"]) == (100.0, 400.0)
    assert flow["seconds"] == 0.62  # 62 intervals; the pause is none of them


def test_throughput_of_the_next_frame_is_that_of_the_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0])
    monkeypatch.setattr(top.time, "monotonic", lambda: next(now))
    first = top.measure(server_of(steady(100, gpu=10, cpu=4)))
    flow = top.measure(server_of(steady(150, gpu=10, cpu=4)), first)["throughput"]
    assert flow == {"of": "the last poll", "seconds": 2.0, "steps_per_s": 25.0, "tokens_per_s": 100.0}


def test_a_server_that_was_started_again_has_no_negative_throughput() -> None:
    first = top.measure(server_of(steady(100, gpu=10, cpu=4)))
    flow = top.measure(server_of(steady(50, gpu=10, cpu=4)), first)["throughput"]
    assert flow["of"] == "the last steps while busy" and flow["steps_per_s"] == 100.0


def test_the_timeline_has_every_track_of_a_step() -> None:
    first, second = top.timeline(
        records(
            2,
            t_intake=[100_000, 110_000],
            t_forward=[102_000, 112_000],
            t_launched=[104_000, 114_000],
            t_process=[114_000, 124_000],
            t_ready=[120_000, 130_000],
            t_output=[122_000, 132_000],
            wait=[6_000, 6_000],
        )
    )
    assert first["schedule"] == [0.0, 4.0] and first["forward"] == [2.0, 20.0]
    # The device goes on where the step before ended, not where the launch was.
    assert second["forward"] == [20.0, 30.0] and second["processing"] == [24.0, 32.0]
    assert (second["path"], second["kind"], second["rows"], second["wait_us"]) == (
        "overlap",
        "decode",
        4,
        6.0,
    )


def test_a_device_on_the_schedulers_thread_works_during_the_call() -> None:
    (only,) = top.timeline(
        records(1, t_intake=100_000, t_forward=102_000, cpu_forward=3_000, t_ready=200_000)
    )
    assert only["forward"] == [2.0, 5.0]


def test_what_did_not_happen_is_no_span() -> None:
    (only,) = top.timeline(records(1, t_intake=5, t_launched=9))
    assert (only["schedule"], only["forward"], only["processing"]) == ([0.0, 0.0], None, None)


def test_only_the_last_steps_are_in_the_timeline() -> None:
    frame = top.measure(server_of(steady(100, gpu=10, cpu=4)))
    assert [step["step"] for step in frame["last"]] == list(range(61, 101))


def test_records_of_another_release_are_told() -> None:
    with pytest.raises(ToolError, match="another release of zos-sglang: step records without column 'step'"):
        top.measure(server_of(records(3), last={}))


# ---------------------------------------------------------------- the command


def test_once_as_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with served(info_of(steady(80, gpu=10, cpu=4), mode="resident")) as url:
        assert cli.main(["top", url, "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    frame = json.loads(line)
    assert frame["url"] == url and frame["mode"] == "resident" and frame["steps"] == 80
    assert frame["paths"] == {"overlap": {"steps": 80, "share": 1.0}}
    assert frame["interval_us"]["p50"] == 10000.0 and len(frame["last"]) == 40


def test_where_the_output_is_no_terminal_one_frame_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with served(info_of(steady(80, gpu=10, cpu=4))) as url:
        assert cli.main(["top", url]) == 0
    assert capsys.readouterr().out.count("throughput") == 1


def test_json_goes_on_until_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", nap)
    with served(info_of(steady(80, gpu=10, cpu=4))) as url:
        assert cli.main(["top", url, "--json", "--interval", "0.5"]) == 130
    frames = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(frames) == 3 and naps == [0.5] * 3
    assert [frame["throughput"]["of"] for frame in frames] == [
        "the last steps while busy",
        *["the last poll"] * 2,
    ]


def test_a_terminal_is_kept_up_to_date_until_the_server_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100, height=60)
    monkeypatch.setattr(top, "console", lambda columns: terminal)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    looks = iter([server_of(steady(count, gpu=10, cpu=4)) for count in (80, 90)])

    def look(*_: Any) -> Server:
        if (found := next(looks, None)) is None:
            raise ToolError("it does not answer")
        return found

    monkeypatch.setattr(top, "look", look)
    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    assert cli.main(["top", "http://there"]) == 2
    assert "80 steps" in out.getvalue() and "90 steps" in out.getvalue()
    # The other screen is left again, and the message stands on the ordinary one.
    assert out.getvalue().count("\x1b[?1049h") == out.getvalue().count("\x1b[?1049l") == 1
    assert capsys.readouterr().err == "zos-sglang: error: it does not answer\n"


@pytest.mark.parametrize("interval", ["0", "-1", "nan"])
def test_polling_without_a_pause_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "http://127.0.0.1:9", f"--interval={interval}"]) == 2
    assert "Allowed: a number from 0.2" in capsys.readouterr().err


# ---------------------------------------------------------------- the view


def test_the_view_names_paths_reasons_and_blocks_with_what_they_cost() -> None:
    lane = LaneAccount(opened=3, decode_steps=100, steps=90)
    frame = top.measure(
        server_of(
            steady(
                200,
                gpu=10,
                cpu=4,
                path=["overlap"] * 190 + ["overlap-blocked"] * 10,
                block=[0] * 190 + ["cpu-bound"] * 10,
                blocked=[-1] * 190 + [250_000] * 10,
                reason=["nothing-pending"] * 20 + ["overlapped"] * 180,
            ),
            lane=lane,
            mode="resident",
        )
    )
    text = drawn(frame)
    assert "O overlap 85.0 %" in text and "o overlap-blocked 5.0 %" in text
    assert "· nothing-pending 10.0 %" in text
    assert "blocked: cpu-bound" in text and "250 us" in text
    assert "90.0 % of decode steps, 3 openings, 0 faults" in text
    assert "10.00 ms" in text and "100 steps/s" in text


def test_the_lane_counts_from_poll_to_poll() -> None:
    def polled(steps: int, decode: int, opened: int, left: dict[str, int], before: Any = None) -> Any:
        lane = LaneAccount(opened=opened, decode_steps=decode, steps=steps)
        lane.left.update({Departure(reason): count for reason, count in left.items()})
        return top.measure(server_of(steady(9, gpu=10, cpu=4), lane=lane, mode="resident"), before)

    first = polled(90, 100, 3, {"intake": 2, "finish": 1})
    assert first["lane"]["of"] == "the start" and first["lane"]["share"] == 0.9
    frame = polled(120, 160, 4, {"intake": 3, "finish": 1}, first)
    lane = frame["lane"]
    assert (lane["opened"], lane["steps"], lane["share"], lane["left"]) == (1, 30, 0.5, {"intake": 1})
    assert "50.0 % of decode steps, 1 openings, 0 faults since the last poll" in drawn(frame)
    assert "not open since the last poll" in drawn(polled(120, 160, 4, {"intake": 3, "finish": 1}, frame))


@pytest.mark.parametrize("width", [20, 60, 200])
def test_the_view_fits_every_terminal(width: int) -> None:
    text = drawn(top.measure(server_of(steady(64, gpu=10, cpu=4))), width)
    assert max(map(len, text.splitlines())) <= width


def test_a_server_without_steps_has_a_view() -> None:
    assert "No steps yet." in drawn(top.measure(server_of(records(0))))


def test_a_device_that_is_the_thread_is_said_to_be() -> None:
    frame = top.measure(server_of(steady(64, gpu=10, cpu=4), asynchronous=False))
    assert "steps overlap in their order only" in drawn(frame)


def test_a_track_shows_how_much_of_each_cell_is_covered() -> None:
    assert _track([(0, 10), (20, 25), None, (39, 39.1)], 0, 40, 4).plain == "█ ▄▁"


def test_numbers_keep_their_size_in_sight() -> None:
    values = [None, 0, 3.14, 250, 1500, 2_500_000]
    assert [microseconds(one) for one in values] == ["-", "0 us", "3.1 us", "250 us", "1.50 ms", "2.50 s"]
    assert [share(one) for one in (None, 0, 0.0004, 0.5)] == ["-", "0.0 %", "<0.1 %", "50.0 %"]
