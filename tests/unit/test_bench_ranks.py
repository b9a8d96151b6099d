"""scripts/bench_ranks.py: the check by itself, and what two servers' runs say about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.testing.bench import ranks


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "DECISIONS", 640)
    monkeypatch.setattr(ranks, "REPEATS", 2)


def run(folder: Path, **cpu_us: list[float]) -> Path:
    """A folder as scripts/bench_zos.py leaves it: one batch size, some repeats of each mode."""
    folder.mkdir()
    repeats = [
        {"waves": {mode: {"cpu_us": {"median": values[i]}} for mode, values in cpu_us.items()}}
        for i in range(len(cpu_us["stock"]))
    ]
    (folder / "bench_zos.json").write_text(
        json.dumps({"points": [{"batch": 16, "repeats": repeats}], "command": "c"})
    )
    return folder


def test_alone_it_measures_both_threads() -> None:
    found = ranks.alone(4)
    assert found["note_us"]["same_batch"]["median"] > 0
    assert found["note_us"]["new_requests"]["median"] > 0
    assert found["per_second"] == pytest.approx(1e6 / found["exchange_us"]["median"], rel=0.01)


def test_runs_with_and_without_the_check_give_its_cost_and_the_gain_over_stock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = [run(tmp_path / "a", stock=[500, 700], overlap=[400, 400])]
    on = [run(tmp_path / f"b{i}", stock=[600], overlap=[405 + i]) for i in range(3)]
    argv = [word for name, folders in (("--off", off), ("--on", on)) for f in folders for word in (name, f)]
    out = tmp_path / "out.json"
    assert ranks.main([*map(str, argv), "--out", str(out)]) == 0
    stock, overlap = json.loads(out.read_text())["servers"]
    assert (stock["mode"], stock["check_us"], stock["over_stock"]) == ("stock", 0, 1)
    assert (overlap["mode"], overlap["batch"], overlap["check_us"]) == ("overlap", 16, 6)
    assert overlap["over_stock"] == 0.667
    shown = json.loads(capsys.readouterr().out)
    assert shown["servers"] == [stock, overlap] and [r["command"] for r in shown["runs"]] == ["c"] * 4


def test_without_a_run_with_the_check_the_modes_are_compared_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks.main(["--off", str(run(tmp_path / "a", stock=[500], resident=[250]))]) == 0
    resident = json.loads(capsys.readouterr().out)["servers"][1]
    assert resident["over_stock"] == 0.5 and "check_us" not in resident


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments: list[Any] = ["--off", str(tmp_path)]
    assert ranks.main(arguments) == 2
    assert "bench_zos.json" in capsys.readouterr().err
