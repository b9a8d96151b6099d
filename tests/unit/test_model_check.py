"""Checking the model against results: inputs come from other modes, misses are marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.made_records import MS, steady
from zos_sglang.observe.columns import to_columns
from zos_sglang.testing.model_check import records, waves
from zos_sglang.testing.model_check.cli import main
from zos_sglang.testing.model_check.compare import cause, line, summary

HEAD = {"commit": "abc", "date": "today", "versions": {"python": "3"}, "machine": {"gpu": "one"}}
SETTING = {"model": "n", "attention": "triton", "prompt": 32, "output": 256}
D2H = 20.0


def bench(folder: Path, forward: float = 800.0, hidden_row: float = 0.0, **cpu: float) -> Path:
    """A result of six batch sizes whose steps follow exactly from G, CPU, F and H (microseconds)."""
    folder.mkdir()
    points, lines = [], []
    for batch in (1, 2, 4, 8, 16, 32):
        device, work = 1500.0 + 100 * batch, 1500.0 + 20 * batch
        spent = {mode: work * cpu.get(mode, 1.0) for mode in ("sync", "stock", "overlap")}
        walls = {mode: max(device, spent[mode] + forward) for mode in ("stock", "overlap")}
        walls |= {
            "sync": device + D2H + spent["sync"] + forward - 500 - hidden_row * batch,
            "resident": device,
        }
        # Stock's thread never sleeps.
        spent |= {"stock": walls["stock"] - forward, "resident": 400.0}
        where = {"attention": "triton", "prompt": 32, "output": 256, "batch": batch}
        points.append({**where, "floor": {"us": device, "mean_len": 160.0}})
        for mode, wall in walls.items():
            samples = {"cpu_ns": [int(spent[mode] * 1000)] * 254, "wall_ns": [int(wall * 1000)] * 254}
            lines.append({**where, "mode": mode, "run": 0, "repeat": 0, **samples})
    identity = {"model": "/models/m", "modes": ["sync", "stock", "overlap", "resident"]}
    data = {"kind": "bench_zos", **HEAD, "identity": identity, "points": points}
    (folder / "bench_zos.json").write_text(json.dumps(data))
    (folder / "waves.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [one for case in waves.cases([folder], D2H) if (one := line(case))]


def test_steps_that_follow_the_model_are_predicted(tmp_path: Path) -> None:
    found = lines_of(bench(tmp_path / "run"))
    assert len(found) == 18
    assert {one["model"] for one in found} == {"m"}
    assert max(abs(one["error"]) for one in found) < 0.001
    assert all(one["cause"] is None for one in found)


def test_a_mode_whose_cpu_differs_is_missed_and_its_own_cpu_says_why(tmp_path: Path) -> None:
    found = [one for one in lines_of(bench(tmp_path / "run", overlap=1.3)) if one["mode"] == "overlap"]
    missed = [one for one in found if not one["within"]]
    assert missed
    for one in missed:
        assert one["own_cpu_within"]
        assert one["cause"].startswith(f"the thread took {one['cpu_ratio']:.2f} times the CPU")


def test_the_step_that_is_predicted_is_no_input_to_it(tmp_path: Path) -> None:
    folder = bench(tmp_path / "run", hidden_row=5.0)
    before = {(one["mode"], one["batch"]): one for one in lines_of(folder)}
    for mode in ("sync", "overlap", "resident"):
        changed = []
        for text in (folder / "waves.jsonl").read_text().splitlines():
            wave = json.loads(text)
            if wave["mode"] == mode and wave["batch"] == 4:
                wave["wall_ns"] = [wall * 2 for wall in wave["wall_ns"]]
                wave["cpu_ns"] = [cpu * 2 for cpu in wave["cpu_ns"]] if mode != "resident" else wave["cpu_ns"]
            changed.append(json.dumps(wave))
        other = tmp_path / mode
        other.mkdir()
        (other / "bench_zos.json").write_text((folder / "bench_zos.json").read_text())
        (other / "waves.jsonl").write_text("\n".join(changed))
        after = {(one["mode"], one["batch"]): one for one in lines_of(other)}
        assert after[mode, 4]["predicted_us"] == before[mode, 4]["predicted_us"]
        assert after[mode, 4]["measured_us"] == pytest.approx(2 * before[mode, 4]["measured_us"])
        assert not after[mode, 4]["within"]


def steps(path: Path) -> Path:
    """Step records of six sizes in three modes."""
    found = []
    for batch in (1, 2, 4, 8, 16, 32):
        gpu = 2 + batch / 10
        for mode, made in (
            ("overlap", steady(80, gpu=gpu, cpu=2.5)),
            ("sync", steady(80, gpu=gpu, cpu=2.5, overlap=False)),
            ("resident", steady(80, gpu=gpu, cpu=0.5, mode="resident", path="resident")),
        ):
            found.append({**SETTING, "batch": batch, "mode": mode, "records": to_columns(made)})
    path.write_text(json.dumps({"kind": "zos_steps", **HEAD, "waves": found}))
    return path


def test_step_records_predict_each_other(tmp_path: Path) -> None:
    found = [line(case) for case in records.cases(steps(tmp_path / "steps.json"))]
    assert len(found) == 18
    for one in found:
        assert one and abs(one["error"]) < 0.001
        assert one["mode"] not in one["sources"].values() or one["mode"] == "resident"


def test_a_miss_without_a_reason_is_said_to_be_one() -> None:
    assert cause(0.04, None, None) is None
    assert cause(0.2, 0.1, 1.1) == "not explained by the mode's own CPU or device time"
    assert cause(0.2, None, None) == "not explained by the mode's own CPU or device time"
    assert (cause(-0.06, -0.04, 1.02) or "").startswith("in part: ")


def test_a_lane_forecast_from_loops_with_gaps_on_the_device_says_how_long_those_are(tmp_path: Path) -> None:
    path = steps(tmp_path / "steps.json")
    data = json.loads(path.read_text())
    for wave in data["waves"]:
        if wave["mode"] != "resident":
            wave["records"]["gpu"] = [2 * us for us in wave["records"]["gpu"]]
    path.write_text(json.dumps(data))
    found = [one for one in map(line, records.cases(path)) if one and one["mode"] == "resident"]
    assert len(found) == 6
    for one in found:
        assert not one["within"] and one["own_cpu_within"] and one["gpu_ratio"] == 2
        assert one["cause"].startswith("a step took the device 2.00 times as long in the loops")


def test_a_summary_counts_by_mode(tmp_path: Path) -> None:
    found = summary(lines_of(bench(tmp_path / "run", overlap=1.3)))
    assert found["sync"]["settings"] == found["resident"]["within"] == 6
    assert found["overlap"]["within"] < found["overlap"]["own_cpu_within"] == 6


def test_the_script_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.json"
    words = [str(bench(tmp_path / "run")), str(steps(tmp_path / "steps.json")), "--out", str(out)]
    assert main(words) == 0
    found = json.loads(out.read_text())
    assert (found["commit"], found["settings"], len(found["lines"])) == ("abc", 12, 36)
    assert [one["name"] for one in found["sources"]] == ["run", "steps.json"]
    assert "resident: 12 of 12 within 5%" in capsys.readouterr().out


def test_bad_sources_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    for source in (tmp_path / "none", tmp_path, wrong):
        assert main([str(source)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_few_settings_are_no_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bench(tmp_path / "run")
    kept = [
        text for text in (folder / "waves.jsonl").read_text().splitlines() if json.loads(text)["batch"] < 8
    ]
    (folder / "waves.jsonl").write_text("\n".join(kept))
    assert main([str(folder)]) == 2
    assert "6 are needed" in capsys.readouterr().err


def test_made_steps_are_what_they_say() -> None:
    made = steady(10, gpu=3, cpu=2)
    assert np.diff(made["t_forward"]).tolist() == [3 * MS] * 9
