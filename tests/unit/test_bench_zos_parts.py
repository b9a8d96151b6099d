"""scripts/bench_zos.py: servers, command line, table and plot, on a made-up server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.fake_bench import OUTPUT, measured
from zos_sglang.modes import MODES
from zos_sglang.testing.bench import plot, zos_cli, zos_run
from zos_sglang.testing.bench.serve import SHAPES, Config, find_model
from zos_sglang.testing.bench.summary import SEPARATE
from zos_sglang.testing.bench.zos_table import print_summary, row_cells

# ------------------------------------------------------------------ servers


def test_the_separate_server_is_stock_without_overlap_and_without_our_variables() -> None:
    config = zos_run.true_sync(
        Config(Path("m"), env={"ZOS_WAIT": "spin", "X": "1"}, args=["--dtype", "half"])
    )
    assert config.mode is None
    assert config.command_args(cuda=True)[-3:] == ["--dtype", "half", "--disable-overlap-schedule"]
    assert config.environment(cuda=True) == {"X": "1"}


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ((4098, 1, 10_000, 4096), "4098 positions a request"),
        ((100, 100, 9_999, 4096), "10000 KV slots, the server has 9999"),
        ((100, 100, 10_000, 4096), None),
    ],
)
def test_a_point_without_room_is_skipped_with_the_reason(
    sizes: tuple[int, int, int, int], complaint: str | None
) -> None:
    found = zos_run.no_room(*sizes)
    assert found == complaint if complaint is None else complaint in (found or "")


def test_random_models_are_known_by_name(tmp_path: Path) -> None:
    assert SHAPES["qwen3-1.7b-shape"].hidden == 2048
    with pytest.raises(FileNotFoundError, match=r"qwen3-1\.7b-shape"):
        find_model("nowhere", tmp_path)


# ------------------------------------------------------------------ command line, table, plot


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "--out"),
        (["--out", "a", "--plot-only", "b"], "--plot-only"),
        (["--modes", "stock,off", "--out", "a"], "'off' is not one of"),
        (["--shapes", "32", "--out", "a"], "no list of shapes"),
        (["--shapes", "0:5", "--out", "a"], "no list of shapes"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zos_cli.main(argv)
    assert complaint in capsys.readouterr().err


def test_the_default_modes_exist() -> None:
    assert set(zos_cli.parser().parse_args(["--out", "a"]).modes) <= set(MODES)


def test_plot_only_without_results_could_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert zos_cli.main(["--plot-only", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_table_shows_ratios_and_a_dash_for_a_missing_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = measured(tmp_path)
    rows = {row["mode"]: row_cells(row, "stock") for row in data["summary"]["rows"]}
    assert rows["resident"][:4] == ["triton", f"32:{OUTPUT}", "4", "resident"]
    assert rows["resident"][4:] == [
        *("-", "-", "500 (500 to 500)", "-", "2.000 (2.000 to 2.000)", "2.000 (2.000 to 2.000)"),
        *("250", "0.500", "1.000", "-", "0", "equal"),
    ]
    assert rows["stock"][8] == "1"
    assert rows[SEPARATE][10:13] == ["-", "-", "-"]
    data["points"][0]["skipped"] = "no room"
    print_summary(data)
    shown = capsys.readouterr().out
    assert "geometric means" in shown
    assert "skipped: no room" in shown


def test_the_panels_have_the_floor_as_a_line_where_there_is_one(tmp_path: Path) -> None:
    rows = measured(tmp_path)["summary"]["rows"]
    lines = plot.series(rows)
    assert "floor" not in lines
    assert lines["resident"] == {
        "batches": [4],
        "step": [500],
        "over_stock": [2.0],
        "over_separate": [2.0],
    }
    assert plot.series([{**row, "floor_us": 480.0} for row in rows])["floor"] == {
        "batches": [4],
        "step": [480.0],
    }


def test_the_plot_is_drawn_from_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured(tmp_path)
    assert zos_cli.main(["--plot-only", str(tmp_path)]) == 0
    assert (tmp_path / "bench_zos.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_way_to_draw_later_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    summary = measured(tmp_path)["summary"]
    with pytest.raises(plot.PlotError, match="--plot-only"):
        plot.draw(summary, "t", tmp_path / "x.png")
    with pytest.raises(plot.PlotError, match="no figures"):
        plot.draw({"rows": []}, "t", tmp_path / "x.png")
