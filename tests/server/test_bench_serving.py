"""scripts/bench_serving.py with SGLang's own benchmark, a real server, and a model without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.testing.bench import serving_cli
from zos_sglang.testing.bench.checkpoint import Shape, make_wide
from zos_sglang.testing.bench.serving import DATASETS

pytestmark = pytest.mark.server

SMALL = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=128, vocab=512, context=2048)
LOAD = "--rates 20 --concurrencies 4 --requests 8 --rounds 2 --repeats 1"
LENGTHS = "--in 32 --out-tokens 12 --prefix 64 --question 8 --groups 2 --scale 0.05"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bench")
    model = make_wide(folder / "model", SMALL, dtype="float32")
    return [
        *("--model", str(model), "--cache", str(folder), "--out", str(folder / "out")),
        *("--modes", "stock,resident", *LOAD.split(), *LENGTHS.split()),
    ]


@pytest.fixture(scope="module")
def measured(flags: list[str]) -> dict[str, Any]:
    assert serving_cli.main(flags) == 0
    return serving_cli.load(Path(flags[flags.index("--out") + 1]))


def test_every_dataset_runs_at_every_load_in_every_mode(measured: dict[str, Any]) -> None:
    rows = measured["summary"]["rows"]
    loads = {(row["dataset"], row["rate"], row["concurrency"], row["mode"]) for row in rows}
    assert loads == {
        (dataset, rate, places, mode)
        for dataset in DATASETS
        for rate, places in ((20.0, None), (None, 4))
        for mode in ("stock", "resident")
    }
    assert all(row["failed"] == 0 and row["requests"] == 8 for row in rows)
    assert measured["complete"]


def test_both_modes_get_the_same_requests_and_give_the_same_answers(measured: dict[str, Any]) -> None:
    rows = measured["summary"]["rows"]
    ours = [row for row in rows if row["mode"] == "resident"]
    assert all(row["answers"] == {"compared": 8, "differing": 0, "first_requests": []} for row in ours)
    # Eight answers that are the same text would prove nothing.
    assert all(len(set(run["digests"])) > 4 for run in measured["runs"])
    for stock, resident in zip(rows[::2], rows[1::2], strict=True):
        assert stock["input_tokens"] == resident["input_tokens"]
        assert stock["output_tokens"] == resident["output_tokens"]


def test_the_lane_ran_in_mode_resident_and_prefixes_were_shared(measured: dict[str, Any]) -> None:
    rows = measured["summary"]["rows"]
    assert all(row["lane_share"] > 0.5 for row in rows if row["mode"] == "resident")
    shared = [row["cached_tokens"] for row in rows if row["dataset"] == "generated-shared-prefix"]
    other = [row["cached_tokens"] for row in rows if row["dataset"] == "random"]
    # Four requests a group. They meet the first one's prefix if that is done, so not all of those at once do.
    assert min(shared) >= 64 and max(other) < min(shared)


def test_a_finished_measurement_is_not_run_again(
    flags: list[str], measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(flags[flags.index("--out") + 1])
    assert serving_cli.main([*flags, "--resume", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["runs"] == measured["runs"] and len(again["calls"]) == 2
    assert not (out / "server-1.log").exists()


def test_another_seed_is_not_mixed_in(
    flags: list[str], measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serving_cli.main([*flags, "--resume", "--seed", "1"]) == 2
    error = capsys.readouterr().err
    assert "seed: 0 then, 1 now" in error and error.count("\n") == 1
