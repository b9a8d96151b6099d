"""The benchmark's arithmetic, files and verdicts, on made-up samples and a made-up server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_bench import report_of
from zos_sglang.testing.bench import canary, cli, gpu, gpu_cli, record
from zos_sglang.testing.bench.canary import oracle_token
from zos_sglang.testing.bench.checkpoint import Shape, make_wide, vocabulary
from zos_sglang.testing.bench.client import BenchError, Wave, prompts
from zos_sglang.testing.bench.measure import Settings, equal_everywhere, measure
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.stats import (
    DROPPED_STEPS,
    FEWEST_STEPS,
    TooFewSteps,
    judge_digests,
    order_of,
    ratio,
    spread,
    steady,
    thinned,
)
from zos_sglang.testing.server import ServerProcess

# ------------------------------------------------------------------ statistics


def test_spread_gives_median_and_quartiles() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found["q1"], found["median"], found["q3"]) == (2.0, 3.0, 4.0)
    assert (found["min"], found["max"], found["mean"]) == (1.0, 100.0, 22.0)


def test_spread_of_one_value_is_that_value() -> None:
    assert set(spread([7.0]).values()) == {7.0}


def test_the_first_steps_of_a_wave_are_dropped() -> None:
    samples = [999] * DROPPED_STEPS + [1] * FEWEST_STEPS
    assert steady(samples, batch=1) == [1] * FEWEST_STEPS


def test_a_batch_that_did_not_decode_together_is_refused_with_the_fix() -> None:
    with pytest.raises(TooFewSteps, match=r"batch 64: 3 steps .*--output-tokens"):
        steady([1, 2, 3], batch=64)


def test_a_ratio_compares_within_each_repeat() -> None:
    # The machine became twice as slow in the second repeat: both modes did, so the ratio holds.
    found = ratio([90.0, 180.0, 99.0], [100.0, 200.0, 100.0])
    assert found == {"per_repeat": [0.9, 0.9, 0.99], "median": 0.9, "min": 0.9, "max": 0.99}


def test_repeats_alternate_which_mode_comes_first() -> None:
    firsts = [order_of(("stock", "overlap"), repeat)[0] for repeat in range(4)]
    assert firsts == ["stock", "overlap", "stock", "overlap"]


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (3, 3), (64, 64), (65, 33), (1000, 63)])
def test_raw_samples_are_thinned_evenly(count: int, kept: int) -> None:
    assert len(thinned(list(range(count)))) == kept


@pytest.mark.parametrize(
    ("digests", "verdict"),
    [
        ({"stock": ["a", "a"], "overlap": ["a", "a"]}, "equal"),
        ({"stock": ["a", "a"], "overlap": ["a", "b"]}, "different"),
        ({"stock": ["a", "b"], "overlap": ["a", "b"]}, "unstable"),
    ],
)
def test_digests_are_judged_against_a_base_that_repeats_itself(
    digests: dict[str, list[str]], verdict: str
) -> None:
    assert judge_digests(digests, "stock") == verdict


def test_a_digest_tells_which_request_said_what() -> None:
    assert Wave([[1, 2], [3]], 0).digest != Wave([[1], [2, 3]], 0).digest


def test_prompts_are_the_same_for_the_same_arguments() -> None:
    assert prompts(3, 5, 100) == prompts(3, 5, 100) != prompts(3, 5, 100, seed=1)
    assert len({tuple(ids) for ids in prompts(64, 32, 384)}) == 64


# ------------------------------------------------------------------ the measurement


class FakeServer:
    """Answers like a server whose step takes a time given by mode. `liar` gives other tokens."""

    def __init__(self, cpu_ns: dict[str, int], liar: str | None = None) -> None:
        self.cpu_ns, self.liar = cpu_ns, liar
        self.mode = "none"
        self.order: list[str] = []
        self.samples: dict[str, dict[str, dict[str, Any]]] | None = {}
        self.paths = {"decode": 5, "fallbacks": 0}

    def zos(self) -> dict[str, Any]:
        steps = None if self.samples is None else report_of(self.samples)
        return {"steps": steps, "paths": dict(self.paths), "reasons": {}, "streams": {}}

    def switch(self, mode: str) -> None:
        self.mode = mode

    def reset_records(self) -> None:
        self.samples = {}

    def wave(self, input_ids: list[list[int]], output_tokens: int) -> Wave:
        self.order.append(self.mode)
        self.paths["decode"] += output_tokens
        batch, step = str(len(input_ids)), self.cpu_ns[self.mode]
        if self.samples is not None:
            self.samples[self.mode] = {
                batch: {"cpu_ns": [step] * output_tokens, "wall_ns": [10 * step] * output_tokens}
            }
        word = 1 if self.mode == self.liar else 0
        return Wave([[i, word] * (output_tokens // 2) for i in range(len(input_ids))], 0.5)


SMALL = Settings(batches=(1, 4), repeats=2, output_tokens=40)


def run(server: FakeServer, settings: Settings = SMALL) -> dict[str, Any]:
    return measure(server, settings, "made up", say=lambda line: None)  # type: ignore[arg-type]


def test_the_measured_ratio_is_that_of_the_samples() -> None:
    result = run(FakeServer({"stock": 2000, "overlap": 1500}))
    assert [(r["batch"], r["mode"], r["over"]) for r in result["ratios"]] == [
        (1, "overlap", "stock"),
        (4, "overlap", "stock"),
    ]
    assert {r["cpu"]["median"] for r in result["ratios"]} == {0.75}
    assert result["cells"][0]["cpu_us"]["median"] == 2.0
    assert result["cells"][0]["wall_us"]["median"] == 20.0


def test_modes_change_places_from_repeat_to_repeat() -> None:
    server = FakeServer({"stock": 1, "overlap": 1})
    run(server, Settings(batches=(1,), repeats=2, output_tokens=40))
    assert server.order == ["stock", "overlap", "stock", "overlap", "overlap", "stock"]


def test_a_mode_that_answers_otherwise_is_found() -> None:
    result = run(FakeServer({"stock": 1, "overlap": 1}, liar="overlap"))
    assert {entry["verdict"] for entry in result["digests"].values()} == {"different"}
    assert not equal_everywhere(result)


def test_a_mode_only_compared_is_not_timed() -> None:
    server = FakeServer({"stock": 1, "overlap": 1, "sync": 1}, liar="sync")
    result = run(server, Settings(batches=(1,), repeats=1, output_tokens=40, compared=("sync",)))
    assert {cell["mode"] for cell in result["cells"]} == {"stock", "overlap"}
    assert result["digests"]["1"]["verdict"] == "different"


def test_counters_are_reported_as_what_the_run_added() -> None:
    server = FakeServer({"stock": 1, "overlap": 1})
    waves = 2 * (2 + 2 * 2)  # batches x (warm-up and repeats of each mode), modes in turn
    assert run(server)["zos"]["paths"] == {"decode": waves * 40, "fallbacks": 0}


def test_a_server_that_does_not_record_is_refused_with_the_fix() -> None:
    server = FakeServer({"stock": 1, "overlap": 1})
    server.reset_records = lambda: setattr(server, "samples", None)  # type: ignore[method-assign]
    with pytest.raises(BenchError, match="ZOS_RECORD=1"):
        run(server)


# ------------------------------------------------------------------ records


def test_a_result_file_is_complete_json_with_raw_lists_on_one_line(tmp_path: Path) -> None:
    data = {"a": {"b": [1, 2, 3], "none": None, "empty": {}}, "rows": [{"x": 1.5}, {"x": "é"}]}
    record.write_json(tmp_path / "deep" / "file.json", data)
    text = (tmp_path / "deep" / "file.json").read_text()
    assert json.loads(text) == data
    assert '"b": [1, 2, 3]' in text
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file.json"]


def test_the_record_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc123")
    head = record.provenance("bench_overlap", ["bench_overlap.py", "--batches", "1,2"])
    assert (head["commit"], head["command"]) == ("abc123", "bench_overlap.py --batches 1,2")
    assert {"python", "sglang", "torch"} <= set(head["versions"])
    assert head["machine"]["cpu"]


def test_the_table_shows_both_modes_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    record.print_table(run(FakeServer({"stock": 2000, "overlap": 1500})))
    shown = capsys.readouterr().out
    assert "0.750 (0.750 to 0.750)" in shown
    assert "overlap" in shown
    assert "equal" in shown


# ------------------------------------------------------------------ the server's flags


def test_cuda_flags_name_graphs_for_the_measured_batches() -> None:
    args = Config(Path("m"), batches=(1, 16)).command_args(cuda=True)
    at = args.index("--cuda-graph-bs-decode")
    assert args[at + 1 : at + 3] == ["1", "16"]
    assert args[args.index("--attention-backend") + 1] == "triton"


def test_graphs_off_disables_decode_graphs() -> None:
    args = Config(Path("m"), graphs=False).command_args(cuda=True)
    assert "--disable-decode-cuda-graph" in args
    assert "--cuda-graph-bs-decode" not in args


def test_own_flags_and_variables_come_last_and_win() -> None:
    config = Config(Path("m"), args=["--dtype", "float16"], env={"OMP_NUM_THREADS": "3"})
    assert config.command_args(cuda=True)[-2:] == ["--dtype", "float16"]
    assert config.environment(cuda=False)["OMP_NUM_THREADS"] == "3"


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--model nowhere"):
        find_model("nowhere", tmp_path)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--modes", "stock,fast"], "'fast' is not one of"),
        (["--modes", "stock"], "at least two"),
        (["--batches", "1,x"], "no list of batch sizes"),
        (["--batches", "0"], "no list of batch sizes"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert complaint in capsys.readouterr().err


def test_a_wrong_env_pair_ends_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--env", "NOVALUE", "--cache", str(tmp_path)])
    assert "--env 'NOVALUE': write NAME=VALUE" in capsys.readouterr().err


def test_a_wide_checkpoint_is_made_once_and_made_anew_for_another_seed(tmp_path: Path) -> None:
    shape = Shape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=64, vocab=128, context=64)
    weights = make_wide(tmp_path / "m", shape, dtype="float32") / "model.safetensors"
    first, made = weights.read_bytes(), weights.stat().st_mtime_ns
    make_wide(tmp_path / "m", shape, dtype="float32")
    assert weights.stat().st_mtime_ns == made
    make_wide(tmp_path / "m", shape, dtype="float32", seed=1)
    assert weights.read_bytes() != first
    assert vocabulary(tmp_path / "m") == 128


# ------------------------------------------------------------------ the device's verdicts

GOOD = {
    "digests": {
        "1": {"verdict": "equal", "answers": 1, "different_answers": 1, "different_tokens_an_answer": 40}
    },
    "ratios": [{"batch": 1, "mode": "overlap", "wall": {"median": 1.004}}],
    "zos": {
        "paths": {"barrier-fine": 9, "barrier-coarse": 2, "barrier-off": 0, "fallbacks": 0},
        "streams": {"schedule": 0, "forward": 11, "copy": 12},
    },
}


def failed(checks: list[gpu.Check]) -> list[str]:
    return [check.what for check in checks if not check.ok]


def test_a_good_timed_part_passes() -> None:
    assert failed(gpu.judge_timing(GOOD, coarse=False)) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ratios": [{"batch": 1, "mode": "overlap", "wall": {"median": 1.006}}]}, "at most 1.00"),
        ({"zos": {**GOOD["zos"], "streams": {"schedule": 0, "forward": 11, "copy": 11}}}, "three distinct"),
        ({"zos": {**GOOD["zos"], "streams": {"schedule": None, "forward": 1, "copy": 2}}}, "three distinct"),
        ({"zos": {**GOOD["zos"], "paths": {**GOOD["zos"]["paths"], "barrier-fine": 0}}}, "fine barrier"),
        ({"zos": {**GOOD["zos"], "paths": {**GOOD["zos"]["paths"], "fallbacks": 1}}}, "fell back"),
        ({"digests": {"1": {**GOOD["digests"]["1"], "verdict": "unstable"}}}, "answers of all modes"),
        ({"digests": {"1": {**GOOD["digests"]["1"], "different_tokens_an_answer": 1}}}, "differ from each"),
    ],
)
def test_each_fault_of_a_timed_part_fails_one_check(change: dict[str, Any], complaint: str) -> None:
    (what,) = failed(gpu.judge_timing({**GOOD, **change}, coarse=False))
    assert complaint in what


def test_the_coarse_part_wants_no_fine_barrier() -> None:
    assert failed(gpu.judge_timing(GOOD, coarse=True)) == ["the coarse barrier fired"]


CLEAN: dict[str, Any] = {
    "broken": None,
    "violations": 0,
    "protected_tokens": 10**6,
    "wrong": [],
    "output_tokens": 200_100,
    "aborted": 5,
    "prefix_hits": 6,
    "retracted_requests": 7,
    "zos": {"mode": "overlap", "reasons": {"overlapped": 8}, "paths": {"fallbacks": 0}},
}


def test_a_clean_canary_passes() -> None:
    assert failed(gpu.judge_canary(CLEAN, 200_000)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"violations": 1},
        {"protected_tokens": 0},
        {"wrong": ["r1: token 3"]},
        {"output_tokens": 199_999},
        {"aborted": 0},
        {"prefix_hits": 0},
        {"retracted_requests": 0},
        {"broken": "ReadError"},
        {"zos": {**CLEAN["zos"], "mode": "stock"}},
    ],
)
def test_each_fault_of_the_canary_fails_one_check(change: dict[str, Any]) -> None:
    assert len(failed(gpu.judge_canary({**CLEAN, **change}, 200_000))) == 1


def test_the_oracle_is_sglangs() -> None:
    import torch
    from sglang.srt.kv_canary.token_oracle.oracle import HashOracle
    from sglang.srt.model_executor.forward_batch_info import _hash_rids_to_tensor

    rids, positions = ["a", "canary-0-17"], [0, 5, 1000, 40959]
    keys = _hash_rids_to_tensor(rids=rids, device=torch.device("cpu"))
    for row, rid in enumerate(rids):
        expected = HashOracle(vocab_size=151936).expected_tokens(
            generalized_req_ids=keys[row].expand(len(positions)), positions=torch.tensor(positions)
        )
        assert [oracle_token(rid, at, 151936) for at in positions] == expected.tolist()


def test_every_part_is_kept_as_soon_as_it_ends(tmp_path: Path) -> None:
    report = gpu_cli.Report(tmp_path, {"kind": "gpu_check"})
    report.add(gpu.PARTS["canary"], {"n": 1}, [gpu.Check("a", True, 1)], None)
    kept = json.loads((tmp_path / "gpu_check.json").read_text())
    assert kept["parts"]["canary"]["passed"]
    assert report.finish() == 0
    report.add(gpu.PARTS["fa3"], {}, [gpu.Check("b", False, 2)], None)
    assert report.finish() == 1
    report.add(gpu.PARTS["triton"], {}, [], "ServerFailed: died")
    assert report.finish() == 2
    assert list(json.loads((tmp_path / "gpu_check.json").read_text())["parts"]) == ["canary", "fa3", "triton"]


def test_without_a_device_the_check_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_cli, "cuda_available", lambda: False)
    assert gpu_cli.main(["--out", str(tmp_path)]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_the_servers_of_the_gpu_checks_get_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception): ...

    def stop(servers: list[ServerProcess], *_: Any) -> None:
        raise Seen([server._env for server in servers])

    monkeypatch.setattr(gpu_cli, "_started", stop)
    parts = ["--part", "canary", "--part", "canary-lane"]
    with pytest.raises(Seen) as seen:
        gpu_cli.main(["--rehearse", "--out", str(tmp_path), *parts, "--env", "ZOS_WAIT=spin"])
    envs = seen.value.args[0]
    assert [env["ZOS_WAIT"] for env in envs] == ["spin", "spin"]
    assert all(set(canary.ENV) <= set(env) for env in envs)


def test_an_env_without_a_value_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_cli.main(["--rehearse", "--out", str(tmp_path), "--env", "ZOS_WAIT"])
    assert "write NAME=VALUE" in capsys.readouterr().err
