"""scripts/bench_zos.py: the floor, and the steps at its KV length, on a made-up server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_bench import OUTPUT, PLAN, FloorServer, measured
from zos_sglang.testing.bench import zos_cli
from zos_sglang.testing.bench.client import BenchError, Wave
from zos_sglang.testing.bench.floor import measure_floor, merged, new_entries, report
from zos_sglang.testing.bench.floor_steps import REACH, add_floor_steps, floor_step_us
from zos_sglang.testing.bench.summary import SEPARATE, summarise
from zos_sglang.testing.bench.zos import Plan
from zos_sglang.testing.bench.zos_file import NAME, RAW_NAME, load

#: Step of each mode at the floor's length, 19 samples into a wave whose steps grow by 10 us each.
GROWTH_US, AT_FLOOR_US = 10, {"stock": 1190, "overlap": 1090, "resident": 690}

# ------------------------------------------------------------------ the floor itself


def test_the_floor_is_asked_for_in_the_middle_of_a_wave(tmp_path: Path) -> None:
    server = FloorServer(tmp_path / "log")
    found, wave = measure_floor(server, [[1] * 32] * 4, OUTPUT, 0.01)  # type: ignore[arg-type]
    assert server.asked == [200]
    assert found is not None
    assert (found["us"], found["mean_len"], found["wanted_len"]) == (480.0, 52.0, 52.0)
    assert wave.tokens == 4 * OUTPUT
    assert len(server.waves) == 1


def test_a_server_that_times_no_floor_gives_null_and_leaves_nothing_pending(tmp_path: Path) -> None:
    server = FloorServer(tmp_path / "log", floor_us=None)
    found, _ = measure_floor(server, [[1] * 32] * 4, OUTPUT, 0.01)  # type: ignore[arg-type]
    assert found is None
    assert server.waves == [("resident", OUTPUT), ("resident", 32)]


def test_a_wave_that_is_over_is_not_asked(tmp_path: Path) -> None:
    server = FloorServer(tmp_path / "log")
    assert measure_floor(server, [[1] * 32] * 4, OUTPUT, 0.5)[0] is None  # type: ignore[arg-type]
    assert server.asked == []


def test_a_server_that_does_not_know_the_word_gives_null(tmp_path: Path) -> None:
    class Old(FloorServer):
        def post(self, path: str, body: dict[str, Any]) -> Any:
            raise BenchError("400")

    assert measure_floor(Old(tmp_path / "log"), [[1] * 32], OUTPUT, 0.01)[0] is None  # type: ignore[arg-type]


def test_only_new_floors_of_the_batch_count() -> None:
    old, new = {"batch": 4, "mean_len": 50, "us": 1.0}, {"batch": 4, "mean_len": 52, "us": 2.0}
    assert new_entries([old], [old, new]) == [new]
    assert new_entries([old], [new]) == [new]
    assert report([{**new, "batch": 1}], 4, 52) is None
    first, second = report([old], 4, 52), report([new], 4, 52)
    assert merged(None, None) is None
    assert merged(None, first) == first
    both = merged(first, second)
    assert both is not None
    assert (both["us"], len(both["raw"])) == (1.5, 2)


def test_time_and_length_of_several_floors_belong_together() -> None:
    entries = [{"batch": 4, "mean_len": float(n), "us": 10.0 * n} for n in (50, 52, 99)]
    found = report(entries, 4, 52)
    assert found is not None
    assert (found["us"], found["mean_len"]) == (520.0, 52.0)


# ------------------------------------------------------------------ steps at its length


def test_only_steps_near_the_floors_length_count() -> None:
    # Sample i of 98 is i us; the floor's length is that of sample 49.
    wall_ns = [1000 * i if abs(i - 49) <= REACH else 10**9 for i in range(98)]
    assert floor_step_us(wall_ns, 32, 100, {"mean_len": 32 + 1 + 49}) == 49.0


def test_a_step_further_off_than_the_reach_does_not_count() -> None:
    wall_ns = [1000] * 98
    assert floor_step_us(wall_ns, 32, 100, {"mean_len": 33 - REACH}) == 1.0
    assert floor_step_us(wall_ns, 32, 100, {"mean_len": 33 - REACH - 1}) is None


def test_an_incomplete_wave_does_not_tell_the_length_of_its_steps() -> None:
    assert floor_step_us([1000] * 97, 32, 100, {"mean_len": 82}) is None


def test_without_a_floor_there_is_no_step_at_its_length() -> None:
    assert floor_step_us([1000] * 98, 32, 100, None) is None


def grown(out: Path, plan: Plan | None = None, **options: Any) -> dict[str, Any]:
    """A result whose steps grow within a wave; its floor is not at the middle of the wave."""
    plan = plan or Plan(PLAN.modes, repeats=2, warmup=1, floors=1)
    return measured(out, plan, FloorServer(out / "log", growth_us=GROWTH_US), **options)


def test_every_wave_keeps_its_step_at_the_floors_length(tmp_path: Path) -> None:
    for repeat in grown(tmp_path)["points"][0]["repeats"]:
        kept = {mode: wave["floor_step_us"] for mode, wave in repeat["waves"].items()}
        assert kept == AT_FLOOR_US


def test_steps_are_held_against_the_floor_at_its_own_length(tmp_path: Path) -> None:
    rows = {row["mode"]: row for row in grown(tmp_path)["summary"]["rows"]}
    assert (rows["resident"]["floor_us"], rows["resident"]["floor_len"]) == (480.0, 52.0)
    for mode, step in AT_FLOOR_US.items():
        assert rows[mode]["step_over_floor"] == round(step / 480, 4)
        assert rows[mode]["step_us"]["median"] != step


def test_the_ratio_is_the_median_over_the_repeats_that_have_one(tmp_path: Path) -> None:
    plan = Plan(PLAN.modes, repeats=4, warmup=1, floors=1)
    data = grown(tmp_path, plan)
    for repeat, step in zip(data["points"][0]["repeats"], (480.0, None, 4800.0, 528.0), strict=True):
        repeat["waves"]["resident"]["floor_step_us"] = step
    rows = {row["mode"]: row for row in summarise(data["points"], "stock")["rows"]}
    assert rows["resident"]["step_over_floor"] == 1.1


def test_the_separate_process_has_no_step_at_the_floors_length(tmp_path: Path) -> None:
    rows = {row["mode"]: row for row in grown(tmp_path)["summary"]["rows"]}
    assert rows[SEPARATE]["step_over_floor"] is None


class Turning(FloorServer):
    """Every mode of a wave has all its samples, more than turns can give."""

    def wave(self, input_ids: list[list[int]], output_tokens: int) -> Wave:
        found = super().wave(input_ids, output_tokens)
        self.samples = {mode: self.samples[self.mode] for mode in PLAN.modes}
        return found


def test_turns_leave_the_ratio_out(tmp_path: Path) -> None:
    plan = Plan(PLAN.modes, repeats=1, warmup=1, turns=2, floors=1)
    data = measured(tmp_path, plan, Turning(tmp_path / "log"), separate=False)
    assert data["points"][0]["floor"]["us"] == 480.0
    assert {row["step_over_floor"] for row in data["summary"]["rows"]} == {None}


# ------------------------------------------------------------------ older results


def aged(out: Path) -> dict[str, Any]:
    """Make `out` look as an older version left it; returns what it was before."""
    now = grown(out, separate=False)
    old = load(out)
    for repeat in old["points"][0]["repeats"]:
        for wave in repeat["waves"].values():
            del wave["floor_step_us"]
    for row in old["summary"]["rows"]:
        del row["floor_len"]
        row["step_over_floor"] = 0.83
    (out / NAME).write_text(json.dumps(old))
    return now


def samples(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / RAW_NAME).read_text().splitlines()]


def test_an_older_result_gets_its_steps_from_the_samples(tmp_path: Path) -> None:
    now, old = aged(tmp_path), load(tmp_path)
    assert add_floor_steps(old, samples(tmp_path)) == 2 * 3
    assert old["points"] == now["points"]


@pytest.mark.parametrize(("what", "value"), [("run", 1), ("batch", 1), ("prompt", 64), ("attention", "fa3")])
def test_samples_of_another_wave_are_not_taken(tmp_path: Path, what: str, value: Any) -> None:
    aged(tmp_path)
    old = load(tmp_path)
    others = [{**record, what: value} for record in samples(tmp_path)]
    assert add_floor_steps(old, others) == 0
    assert old["points"][0]["repeats"][0]["waves"]["stock"]["floor_step_us"] is None


def test_a_step_that_is_there_is_kept(tmp_path: Path) -> None:
    data = grown(tmp_path)
    for record in (found := samples(tmp_path)):
        record["wall_ns"] = [1] * (OUTPUT - 2)
    assert add_floor_steps(data, found) == 0
    assert data["points"][0]["repeats"][0]["waves"]["stock"]["floor_step_us"] == AT_FLOOR_US["stock"]


def test_an_older_result_with_turns_gets_none(tmp_path: Path) -> None:
    aged(tmp_path)
    old = load(tmp_path)
    old["identity"]["turns"] = 2
    assert add_floor_steps(old, samples(tmp_path)) == 0


def test_plot_only_brings_an_older_file_up_to_date(tmp_path: Path) -> None:
    now = aged(tmp_path)
    zos_cli.main(["--plot-only", str(tmp_path)])
    assert load(tmp_path) == now


def test_plot_only_overlooks_a_line_that_a_kill_tore(tmp_path: Path) -> None:
    now = aged(tmp_path)
    with (tmp_path / RAW_NAME).open("a") as sink:
        sink.write('{"run":0,"attention":"tri')
    zos_cli.main(["--plot-only", str(tmp_path)])
    assert load(tmp_path) == now


def test_plot_only_shows_no_old_ratio_where_there_are_no_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aged(tmp_path)
    (tmp_path / RAW_NAME).unlink()
    zos_cli.main(["--plot-only", str(tmp_path), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert {row["step_over_floor"] for row in shown["summary"]["rows"]} == {None}


@pytest.mark.parametrize("samples_there", [True, False])
def test_plot_only_writes_nothing_that_it_has_no_news_for(tmp_path: Path, samples_there: bool) -> None:
    if samples_there:
        grown(tmp_path)
    else:
        aged(tmp_path)
        (tmp_path / RAW_NAME).unlink()
    before = (tmp_path / NAME).stat().st_ino
    zos_cli.main(["--plot-only", str(tmp_path)])
    # Another inode would be a file written anew.
    assert (tmp_path / NAME).stat().st_ino == before
