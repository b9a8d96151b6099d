"""Pictures of the documentation show what the result files and the stored traces hold."""

from __future__ import annotations

import copy
import json
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from zos_sglang.observe.trace_reader import read
from zos_sglang.testing.docs import picture, result_figures, timeline

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "bench" / "results"
TRACES = ROOT / "docs" / "traces"


def test_the_figures_show_the_results_at_hand() -> None:
    wanted = {IMAGES / name: found for name, found in result_figures.figures(RESULTS).items()}
    assert picture.stale(wanted) == [], "python scripts/plot_results.py"


def test_the_timelines_show_the_traces_at_hand() -> None:
    wanted = {IMAGES / name: found for name, found in timeline.pictures(TRACES).items()}
    assert picture.stale(wanted) == [], "python scripts/make_docs_images.py --timelines"


def test_a_picture_of_other_data_is_stale_and_so_is_a_missing_one(tmp_path: Path) -> None:
    data, draw = result_figures.figures(RESULTS)["results-cpu.png"]
    path = tmp_path / "a.png"
    assert picture.stale({path: (data, draw)}) == [path]
    picture.write(path, data, draw)
    assert picture.stale({path: (data, draw)}) == []
    other = copy.deepcopy(data)
    other["0.6B, FA3"]["stock"][0][0] += 0.001
    assert picture.stale({path: (other, draw)}) == [path]
    Image.new("RGB", (4, 4)).save(path)
    assert picture.stale({path: (data, draw)}) == [path]


def test_check_of_the_script_names_stale_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "plot_results.py"))["main"]
    monkeypatch.setattr(sys, "argv", ["plot_results.py", "--check"])
    assert script() == 0
    monkeypatch.setattr(sys, "argv", ["plot_results.py", "--check", "--out", str(tmp_path)])
    assert script() == 1
    assert capsys.readouterr().err.count("run scripts/plot_results.py") == len(
        result_figures.figures(RESULTS)
    )


def test_the_same_data_give_the_same_bytes(tmp_path: Path) -> None:
    data, draw = timeline.pictures(TRACES)["steps-sync.png"]
    for name in ("a.png", "b.png"):
        picture.write(tmp_path / name, data, draw)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_figure_takes_medians_and_spread_of_the_short_prompts_by_batch() -> None:
    row = {"prompt": 32, "output": 256, "mode": "resident"}
    spread = {"median": 2.0, "min": 1.0, "max": 3.0, "q1": 9.0}
    rows = [
        {**row, "batch": 16, "over_stock": spread, "step_over_floor": 1.5},
        {**row, "batch": 1, "over_stock": spread, "step_over_floor": 1.25},
        {**row, "batch": 1, "prompt": 4096, "over_stock": spread, "step_over_floor": 9.0},
    ]
    kept = result_figures.rows_of({"summary": {"rows": rows}})
    assert result_figures.table(kept, "step_over_floor", ["resident"]) == {
        "batches": [1, 16],
        "resident": [1.25, 1.5],
    }
    assert result_figures.table(kept, "over_stock", ["resident"])["resident"] == [[2.0, 1.0, 3.0]] * 2


def test_the_figure_of_prefills_has_each_rule_against_never_and_not_never_itself() -> None:
    ratio = {
        name: {"median": 1.5, "min": 1.0, "max": 2.0, "q1": 9.0} for name in result_figures.PREFILL_METRICS
    }
    rows = [
        {"load": load, "rule": rule, "over_never": {**ratio, "e2e_ms.p50": None}}
        for load in ("burst", "chunked")
        for rule in ("never", "stock", "first-token")
    ]
    found = result_figures.prefill({"summary": {"rows": rows}})
    assert {load: list(rules) for load, rules in found.items()} == {
        "burst": ["stock", "first-token"],
        "chunked": ["stock", "first-token"],
    }
    assert found["burst"]["stock"] == [[1.5, 1.0, 2.0]] * len(result_figures.PREFILL_METRICS)


def test_the_figure_of_grammars_has_steps_in_milliseconds_by_share_of_rows() -> None:
    def row(share: float, us: float) -> dict[str, Any]:
        spread = {"median": us, "min": us - 500, "max": us + 500}
        return {"share": share, "mode": "stock", "step_us": spread, "over_none": dict.fromkeys(spread, 2.0)}

    found = result_figures.grammar({"summary": {"rows": [row(25, 4000), row(0, 2000)]}})
    assert found == {"stock": [[0, [2.0, 1.5, 2.5], [2.0] * 3], [25, [4.0, 3.5, 4.5], [2.0] * 3]]}


# ------------------------------------------------------------------ excerpts of traces


@pytest.mark.parametrize("mode", timeline.TITLES)
def test_a_stored_excerpt_is_a_whole_trace_of_its_mode(mode: str) -> None:
    trace = read(TRACES / f"{mode}.json")
    assert len(trace.records) == timeline.STEPS and trace.asynchronous
    assert trace.meta["facts"]["mode"] == mode
    assert not [note for note in trace.notes if "damaged" in note or "missing" in note]


def test_steps_overlap_in_the_traces_of_three_modes_and_not_in_that_of_sync() -> None:
    for mode in timeline.TITLES:
        steps = timeline.spans(TRACES / f"{mode}.json")
        before = [following["schedule"][0] < step["process"][0] for step, following in pairwise(steps)]
        assert all(before) if mode != "sync" else not any(before), mode


def decode(step: int, at: float, length: float, rows: int = 16) -> list[dict[str, Any]]:
    """A step's slices as a trace has them; microseconds."""
    args = {"step": step, "rows": rows, "path": "overlap"}
    return [
        {"name": "decode", "ph": "X", "tid": 1, "ts": at, "dur": 1.0, "args": args},
        {"name": "process", "ph": "X", "tid": 4, "ts": at + 1, "dur": length, "args": {"step": step}},
    ]


def write(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n")


def test_an_excerpt_is_a_stretch_of_median_length_of_the_last_long_run(tmp_path: Path) -> None:
    head = {"name": "process_name", "ph": "M", "args": {"name": "scheduler 0"}}
    lengths = [5.0] * 20
    lengths[12] = 500.0  # another process was at work
    events = [head, *decode(1, 0, 5, rows=2)]
    at = 100.0
    for step, length in enumerate(lengths, 2):
        events += decode(step, at, length)
        at += length + 10
    write(tmp_path / "trace.json", events)
    timeline.excerpt(tmp_path / "trace.json", tmp_path / "out.json", steps=4)
    found = json.loads((tmp_path / "out.json").read_text())
    steps = sorted({event["args"]["step"] for event in found if event["ph"] == "X"})
    assert found[0]["name"] == "process_name"
    assert len(steps) == 4 and steps[-1] - steps[0] == 3 and 1 not in steps
    assert 14 not in steps


def test_a_trace_without_a_long_run_of_one_batch_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace.json", [e for n in range(40) for e in decode(n, n * 10.0, 5, rows=n % 2)])
    with pytest.raises(ValueError, match="in a row"):
        timeline.excerpt(tmp_path / "trace.json", tmp_path / "out.json", steps=4)
