"""scripts/bench_zos.py: its arithmetic, its file and its verdicts, on a made-up server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.fake_bench import OUTPUT, PLAN, STEP_US, FakeServer, engine, measured, result_file
from zos_sglang.testing.bench import zos_cli, zos_run
from zos_sglang.testing.bench.client import Wave
from zos_sglang.testing.bench.counters import gained, h2d_per_step, lane_figures
from zos_sglang.testing.bench.logtime import step_times
from zos_sglang.testing.bench.stats import TooFewSteps, geometric_mean
from zos_sglang.testing.bench.store import ResumeError
from zos_sglang.testing.bench.summary import SEPARATE, judge, summarise
from zos_sglang.testing.bench.zos import Budget, OutOfTime, Plan, live_point, log_times
from zos_sglang.testing.bench.zos_file import NAME, load

# ------------------------------------------------------------------ arithmetic


def test_the_geometric_mean_skips_what_is_not_there() -> None:
    assert geometric_mean([2.0, None, 8.0]) == 4.0
    assert geometric_mean([1.35, 1.35]) == 1.35
    assert geometric_mean([None, None]) is None


def test_counts_are_what_a_wave_added() -> None:
    before = {"paths": {"decode": 5, "mixed": 1}, "lane": {"steps": 2, "left": {"intake": 1}, "share": 0.1}}
    after = {
        "paths": {"decode": 9, "mixed": 1},
        "lane": {"steps": 2, "left": {"intake": 1, "finish": 3}, "share": 0.9},
        "steps": {},
    }
    assert gained(before, after) == {"paths": {"decode": 4}, "lane": {"steps": 0, "left": {"finish": 3}}}
    assert gained({}, {"paths": {}}) == {}


def test_the_share_counts_useful_row_steps_only() -> None:
    growth = {"lane": {"steps": 100, "row_steps": 400, "wasted_row_steps": 4, "opened": 1, "h2d_copies": 50}}
    found = lane_figures(growth, batch=4, decode_steps=100)
    assert found is not None
    assert (found["share"], found["wasted_share"], found["h2d_per_step"]) == (0.99, 0.01, 0.5)


def test_an_unknown_number_of_steps_gives_no_share_unless_the_lane_counts_them() -> None:
    lane = {"steps": 50, "row_steps": 50, "wasted_row_steps": 0}
    assert lane_figures({"lane": lane}, 1, None)["share"] is None  # type: ignore[index]
    assert lane_figures({"lane": {**lane, "decode_steps": 100}}, 1, None)["share"] == 0.5  # type: ignore[index]
    assert lane_figures({"paths": {}}, 1, 10) is None


def test_copies_are_null_where_the_server_does_not_count_them() -> None:
    assert h2d_per_step({"steps": 10}) is None
    assert h2d_per_step({"steps": 0, "h2d_copies": 0}) is None
    assert h2d_per_step({"steps": 10, "h2d_copies": 0}) == 0


LOG = [
    "Prefill batch, #new-seq: 4",
    "Decode batch, #running-req: 4, token usage: 0.0, gen throughput (token/s): 10.00, x",
    "Decode batch, #running-req: 4, token usage: 0.0, gen throughput (token/s): 2000.00, x",
    "Decode batch, #running-req: 4, token usage: 0.0, gen throughput (token/s): 4000.00, x",
]


def test_a_log_without_switches_counts_under_the_mode_that_is_known() -> None:
    assert step_times(LOG) == {}
    assert step_times(LOG, "sync") == {(4, "sync"): [2000.0, 1000.0]}


def test_throughput_from_the_log_is_rows_over_the_mean_step() -> None:
    found = log_times(["zos-sglang: mode stock -> resident", *LOG], 4)
    assert found["log_step_us"]["raw"] == [2000.0, 1000.0]
    assert found["log_tokens_per_s"] == round(4 / 1500 * 1e6, 2)
    assert log_times(LOG[:2], 4) == {"log_step_us": None, "log_tokens_per_s": None}
    assert log_times(LOG, 16)["log_step_us"] is None


@pytest.mark.parametrize(
    ("outputs", "flags"),
    [([256, 1024], []), ([48], ["--decode-log-interval", "8"]), ([3], ["--decode-log-interval", "1"])],
)
def test_short_answers_get_more_log_lines(outputs: list[int], flags: list[str]) -> None:
    assert zos_run.log_interval(outputs) == flags


# ------------------------------------------------------------------ waves


def test_rows_carry_ratios_over_stock_and_over_the_separate_process(tmp_path: Path) -> None:
    data = measured(tmp_path)
    rows = {row["mode"]: row for row in data["summary"]["rows"]}
    assert list(rows) == ["stock", "overlap", "resident", SEPARATE]
    assert rows["resident"]["over_stock"]["median"] == 2.0
    assert rows["resident"]["cpu_over_stock"]["median"] == 0.5
    assert rows["resident"]["step_us"]["median"] == 500
    # The separate server is made up at stock's speed.
    assert rows["resident"]["over_separate"]["median"] == 2.0
    assert rows[SEPARATE]["over_stock"]["median"] == 1.0
    assert rows[SEPARATE]["step_mean_us"]["median"] == 1000
    assert rows["resident"]["lane"]["share"] == 1.0
    assert rows["overlap"]["lane"] is None


def test_the_means_go_over_the_batch_sizes(tmp_path: Path) -> None:
    data = measured(tmp_path)
    four = data["points"][0]
    one = json.loads(json.dumps(four)) | {"batch": 1}
    for repeat in one["repeats"]:
        repeat["waves"]["resident"]["tokens_per_s"] /= 4
    means = {mean["mode"]: mean for mean in summarise([four, one], "stock")["geomeans"]}
    assert means["resident"]["batches"] == [4, 1]
    assert means["resident"]["over_stock"] == 1.0  # of 2 and 1/2
    assert means["resident"]["step_over_floor"] is None


def test_every_sample_is_kept_beside_the_summary(tmp_path: Path) -> None:
    measured(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "waves.jsonl").read_text().splitlines()]
    assert len(lines) == PLAN.repeats * 3
    assert len(lines[0]["wall_ns"]) == OUTPUT - 2
    assert {line["mode"] for line in lines} == {"stock", "overlap", "resident"}


def test_turns_within_a_wave_give_every_mode_its_samples(tmp_path: Path) -> None:
    class Turning(FakeServer):
        def wave(self, input_ids: list[list[int]], output_tokens: int) -> Wave:
            found = super().wave(input_ids, output_tokens)
            for mode in STEP_US:
                self.samples[mode] = self.samples[self.mode]
            return found

    plan = Plan(PLAN.modes, repeats=1, warmup=1, turns=2, floors=0)
    server = Turning(tmp_path / "log")
    data = measured(tmp_path, plan, server, separate=False)
    waves = data["points"][0]["repeats"][0]["waves"]
    assert len(server.waves) == 3 + 1  # a warm-up of each mode, one wave for all
    assert {wave["digest"] for wave in waves.values()} == {waves["stock"]["digest"]}
    assert waves["stock"]["log_tokens_per_s"] is None
    assert waves["resident"]["lane"]["share"] is None


def test_a_batch_that_never_decoded_together_is_an_error_of_its_point(tmp_path: Path) -> None:
    with pytest.raises(TooFewSteps, match="batch 4"):
        result = result_file(tmp_path)
        point = result.point("triton", 32, 8, 4)
        live_point(engine(FakeServer(tmp_path / "log")), point, PLAN, result.keep_raw, result.save)


# ------------------------------------------------------------------ the file


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            self.now += 1
            return self.now

    result = result_file(tmp_path)
    point = result.point("triton", 32, OUTPUT, 4)
    server = FakeServer(tmp_path / "log")
    # Three warm-ups and the first repeat's three waves fit.
    with pytest.raises(OutOfTime):
        live_point(engine(server, Budget(13, Clock())), point, PLAN, result.keep_raw, result.save)
    assert [repeat["repeat"] for repeat in load(tmp_path)["points"][0]["repeats"]] == [0]

    again = result_file(tmp_path, resume=True)
    point = again.point("triton", 32, OUTPUT, 4)
    server.waves.clear()
    live_point(engine(server), point, PLAN, again.keep_raw, again.save)
    assert [repeat["repeat"] for repeat in point["repeats"]] == [0, 1]
    assert len(server.waves) == 3 + 3  # warm-ups anew, then only the second repeat
    server.waves.clear()
    live_point(engine(server), point, PLAN, again.keep_raw, again.save)
    assert server.waves == []
    assert len(load(tmp_path)["runs"]) == 2


def test_another_version_is_not_resumed(tmp_path: Path) -> None:
    measured(tmp_path)
    with pytest.raises(ResumeError, match=r"versions: .*0\.5\.23.* then, .*0\.5\.24.* now"):
        result_file(tmp_path, resume=True, versions={"sglang": "0.5.24"})
    with pytest.raises(ResumeError, match="machine"):
        result_file(tmp_path, resume=True, machine={"cpu": "c", "gpu": "H200"})


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    measured(tmp_path)
    with pytest.raises(ResumeError, match="--resume"):
        result_file(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "bench_overlap"}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ResumeError, match=NAME):
        load(tmp_path)


def test_the_file_has_the_shape_that_readers_rely_on(tmp_path: Path) -> None:
    data = measured(tmp_path)
    assert {"kind", "commit", "date", "versions", "machine", "identity", "runs", "points", "summary"} <= set(
        data
    )
    (point,) = data["points"]
    assert {"skipped", "error", "variety", "floor", "warmups", "repeats", "separate"} <= set(point)
    wave = point["repeats"][0]["waves"]["resident"]
    wanted = {"digest", "seconds", "tokens", "cpu_us", "wall_us", "tokens_per_s", "lane", "counts"}
    assert wanted | {"log_step_us", "log_tokens_per_s"} <= set(wave)
    assert set(data["summary"]) == {"base", "rows", "geomeans", "answers"}
    assert data["summary"]["rows"][0]["floor_us"] is None


# ------------------------------------------------------------------ answers


def test_a_mode_that_answers_otherwise_ends_with_1(tmp_path: Path) -> None:
    data = measured(tmp_path, server=FakeServer(tmp_path / "log", liar="overlap"))
    (answer,) = data["summary"]["answers"]
    assert answer["verdict"] == "different"
    assert set(answer["differing"]) == {"0", "1"}
    assert zos_cli.exit_code(data) == 1


def test_equal_answers_end_with_0_and_count_their_pairs(tmp_path: Path) -> None:
    data = measured(tmp_path)
    (answer,) = data["summary"]["answers"]
    # Against stock, a repeat each: overlap, resident, separate; and the three warm-ups on repeat 0's prompts.
    assert (answer["verdict"], answer["pairs"], answer["equal_pairs"]) == ("equal", 9, 9)
    assert zos_cli.exit_code(data) == 0


def test_the_separate_process_is_compared_too(tmp_path: Path) -> None:
    data = measured(tmp_path)
    point = data["points"][0]
    point["separate"]["repeats"][1]["digest"] = "other"
    assert judge(point, "stock")["verdict"] == "different"
    assert list(judge(point, "stock")["differing"]) == ["1"]


def test_a_base_that_contradicts_itself_proves_nothing(tmp_path: Path) -> None:
    point = measured(tmp_path)["points"][0]
    point["warmups"][0]["digest"] = "other"
    assert judge(point, "stock")["verdict"] == "unstable"


def test_a_run_without_comparison_could_not_run(tmp_path: Path) -> None:
    result = result_file(tmp_path)
    result.point("triton", 32, OUTPUT, 4)
    result.save()
    assert zos_cli.exit_code(result.data) == 2
