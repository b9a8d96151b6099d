"""bench_wake: long pieces of Python after steps that waited one way or another."""

from __future__ import annotations

import json

import pytest

from zos_sglang.testing.bench import wake

SMALL = ("--steps", "3", "--work-us", "200", "--wait-us", "300", "--piece-us", "1600", "--repeats", "3")


def test_every_way_of_waiting_is_measured_in_every_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    assert wake.main([*SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(run["repeat"], run["way"]) for run in result["runs"]][:5] == [
        *((0, "block"), (0, "spin"), (0, "poll"), (0, "busy")),
        (1, "spin"),
    ]
    assert [row["way"] for row in result["summary"]] == ["block", "spin", "poll", "busy"]
    assert all(len(run["slices_us"]) == wake.SLICES for run in result["runs"])
    assert result["summary"][-1]["over"]["median"] == 1


def test_a_slower_piece_shows_in_its_ratio_and_a_core_that_speeds_up_in_its_slices() -> None:
    runs = [
        {"way": "block", "repeat": 0, "slices_us": [300.0, 100.0]},
        {"way": "busy", "repeat": 0, "slices_us": [100.0, 100.0]},
    ]
    block, busy = wake.summarise(runs, ("block", "busy"))
    assert (block["over"]["median"], block["slices_us"], busy["over"]["median"]) == (2, [300, 100], 1)


@pytest.mark.parametrize("rows", [1, 50, 20_000])
def test_work_takes_about_as_long_as_it_is_asked_to(rows: int) -> None:
    work = wake.Work(rows)
    # The least of many: a busy machine makes single ones longer.
    assert 0.2 < min(work.run_us(2000) for _ in range(20)) / 2000 < 5


def test_the_rows_that_the_work_walks_over_stand_in_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert wake.main([*SMALL, "--ways", "poll", "--rows", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["rows"] == 50


def test_an_unknown_way_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wake.main(["--ways", "nap"])
    assert "'nap' is not one of block, spin, poll, busy" in capsys.readouterr().err
