"""scripts/bench_serving.py: what it asks SGLang's benchmark for, what it reads, its data set, its tables."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.bench.plots import lines_by_mode
from zos_sglang.testing.bench.serving import DATASETS, SHARED, Lengths, Point, Target, arguments, points
from zos_sglang.testing.bench.serving_plot import draw, groups
from zos_sglang.testing.bench.serving_result import LATENCIES, STATISTICS, read_result
from zos_sglang.testing.bench.serving_summary import METRICS, summarise
from zos_sglang.testing.bench.serving_table import FIGURES, SHOWN, ratio_cells, row_cells
from zos_sglang.testing.bench.sharegpt import MOST_BOTH, MOST_PROMPT, conversations, lengths
from zos_sglang.testing.bench.words import Texts, make_words, tokenizer_of
from zos_sglang.testing.models import make_tiny

TARGET = Target("http://127.0.0.1:1", Path("tok"), Path("conversations.json"), 4096)


def upstream_source() -> str:
    """SGLang's benchmark as text; to import it takes ten seconds."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    new, old = package / "benchmark" / "serving.py", package / "bench_serving.py"
    return (new if new.exists() else old).read_text()


# ------------------------------------------------------------------ what is asked for


def test_every_dataset_has_every_load() -> None:
    found = points(DATASETS, (4.0, 16.0), (8,), Lengths(groups=8), most=100, seconds=10, rounds=4)
    assert [(point.dataset, point.rate, point.concurrency, point.requests) for point in found] == [
        *(("random", 4.0, None, 40), ("random", 16.0, None, 100), ("random", None, 8, 32)),
        *(("sharegpt", 4.0, None, 40), ("sharegpt", 16.0, None, 100), ("sharegpt", None, 8, 32)),
        *((SHARED, 4.0, None, 40), (SHARED, 16.0, None, 104), (SHARED, None, 8, 32)),
    ]


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize(("rate", "places"), [(4.0, None), (None, 8)])
def test_every_flag_is_one_of_sglangs(dataset: str, rate: float | None, places: int | None) -> None:
    asked = arguments(Point(dataset, rate, places, 16), Lengths(), TARGET, 0, Path("run.jsonl"))
    known = upstream_source()
    assert [word for word in asked if word.startswith("--") and f'"{word}"' not in known] == []


def test_a_rate_is_open_and_a_concurrency_is_not() -> None:
    def asked(point: Point) -> dict[str, str]:
        words = arguments(point, Lengths(), TARGET, 7, Path("run.jsonl"))
        return dict(pairwise(words))

    at_a_rate = asked(Point("random", 0.5, None, 16))
    assert at_a_rate["--request-rate"] == "0.5" and "--max-concurrency" not in at_a_rate
    at_a_time = asked(Point("random", None, 4, 16))
    assert (at_a_time["--request-rate"], at_a_time["--max-concurrency"]) == ("inf", "4")
    assert (at_a_time["--num-prompts"], at_a_time["--seed"]) == ("16", "7")


def test_prompts_of_a_shared_prefix_are_never_taken_from_sglangs_own_file() -> None:
    """That file is named after the tokenizer's class only, and is not written unless the ratio is 1."""
    asked = arguments(Point(SHARED, 4.0, None, 16), Lengths(), TARGET, 0, Path("run.jsonl"))
    assert float(asked[asked.index("--gsp-range-ratio") + 1]) < 1
    assert asked[asked.index("--gsp-prompts-per-group") + 1] == "2"


# ------------------------------------------------------------------ what is read


def record(requests: int = 3, **changed: Any) -> dict[str, Any]:
    """A line as SGLang 0.5.23 writes it with --output-details and --cache-report, all latencies 7 ms."""
    return {
        "backend": "sglang",
        "request_rate": float("inf"),
        "duration": 1.5,
        "completed": requests,
        "total_input_tokens": 30,
        "total_output_tokens": 12,
        "request_throughput": 2.0,
        "output_throughput": 8.0,
        "concurrency": 1.25,
        "cache_report": {"total_cached_tokens": 5},
        **{f"{which}_{what}_ms": 7.0 for which in STATISTICS.values() for what in LATENCIES.values()},
        "generated_texts": [f"answer {index}" for index in range(requests)],
        "errors": [""] * requests,
        **changed,
    }


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_the_fields_that_are_read_are_those_that_sglang_writes() -> None:
    source = upstream_source()
    assert [name for name in record() if f'"{name}"' not in source and f'["{name}"]' not in source] == []


def test_figures_are_sglangs_own(tmp_path: Path) -> None:
    found = read_result(written(tmp_path / "run.jsonl", record(median_ttft_ms=9.0, p99_itl_ms=3.25)), 3)
    assert (found["requests_per_s"], found["tokens_per_s"], found["cached_tokens"]) == (2.0, 8.0, 5)
    assert (found["ttft_ms"]["p50"], found["itl_ms"]["p99"], found["e2e_ms"]["mean"]) == (9.0, 3.25, 7.0)
    assert (found["failed"], found["errors"]) == (0, [])
    assert len(set(found["digests"])) == 3


def test_a_failed_request_is_counted_and_has_no_digest(tmp_path: Path) -> None:
    errors = ["", "Traceback\n  line\nConnectionError: gone\n", ""]
    found = read_result(written(tmp_path / "run.jsonl", record(completed=2, errors=errors)), 3)
    assert (found["failed"], found["errors"]) == (1, ["request 1: ConnectionError: gone"])
    assert [digest is None for digest in found["digests"]] == [False, True, False]


def test_pieces_of_answers_are_not_compared(tmp_path: Path) -> None:
    found = read_result(written(tmp_path / "run.jsonl", record()), 3, whole_texts=False)
    assert found["digests"] == [None] * 3


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "cannot be read"),
        ([record(), record()], "2 lines instead of one"),
        ([record(2)], "2 requests, 3 were asked for"),
        ([{"errors": [""] * 3}], "completed"),
    ],
)
def test_a_file_that_is_not_as_expected_is_refused(
    tmp_path: Path, records: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        read_result(written(tmp_path / "run.jsonl", *records), 3)
    with pytest.raises(BenchError, match=r"absent\.jsonl"):
        read_result(tmp_path / "absent.jsonl", 3)


# ------------------------------------------------------------------ the data set


def test_lengths_have_the_published_means_and_keep_the_cuts() -> None:
    drawn = list(islice(lengths(seed=0), 40_000))
    assert statistics.fmean(prompt for prompt, _ in drawn) == pytest.approx(213.987, rel=0.02)
    assert statistics.fmean(answer for _, answer in drawn) == pytest.approx(199.771, rel=0.02)
    assert max(prompt for prompt, _ in drawn) <= MOST_PROMPT
    assert max(prompt + answer for prompt, answer in drawn) <= MOST_BOTH


def test_lengths_follow_the_seed_and_the_scale() -> None:
    first = list(islice(lengths(seed=1), 50))
    assert first == list(islice(lengths(seed=1), 50)) != list(islice(lengths(seed=2), 50))
    assert all(
        (short, brief) == (max(4, round(prompt / 4)), max(4, round(answer / 4)))
        for (short, brief), (prompt, answer) in zip(lengths(seed=1, scale=0.25), first, strict=False)
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_words(tmp_path_factory.mktemp("words") / "tokenizer", 4000)


@pytest.fixture(scope="module")
def tiny() -> Path:
    return make_tiny("qwen3", Path(__file__).parents[2] / ".cache" / "tiny-qwen3")


def test_sglang_reads_the_conversations_with_the_lengths_that_were_drawn(words: Path, tmp_path: Path) -> None:
    from sglang.benchmark.datasets.sharegpt import sample_sharegpt_requests
    from sglang.benchmark.utils import get_tokenizer

    path = tmp_path / "conversations.json"
    path.write_text(conversations(words, 20, seed=3))
    rows = sample_sharegpt_requests(str(path), 20, get_tokenizer(str(words)))
    drawn = list(islice(lengths(seed=3), 20))
    assert sorted((row.prompt_len, row.output_len) for row in rows) == sorted(drawn)
    assert len({row.prompt for row in rows}) == 20


def test_the_same_seed_makes_the_same_file(words: Path) -> None:
    assert (
        conversations(words, 5, seed=0) == conversations(words, 5, seed=0) != conversations(words, 5, seed=1)
    )


def test_a_text_has_the_wanted_tokens_in_a_byte_pair_tokenizer_too(tiny: Path) -> None:
    texts, source = Texts(tiny), random.Random(0)
    for wanted in (4, 50, 300):
        text = texts.text(wanted, source)
        assert text.isascii() and wanted * 0.95 - 1 <= texts.length(text) <= wanted


def test_a_model_without_a_tokenizer_gets_one_of_words(tiny: Path, tmp_path: Path) -> None:
    assert tokenizer_of(tiny, tmp_path) == tiny
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"vocab_size": 64}')
    made = tokenizer_of(bare, tmp_path)
    assert made.is_relative_to(tmp_path) and not (bare / "tokenizer.json").exists()
    assert tokenizer_of(bare, tmp_path) == made


def test_words_turn_into_tokens_and_back_without_loss(words: Path) -> None:
    from sglang.benchmark.utils import get_tokenizer

    tokenizer = get_tokenizer(str(words))
    ids = [0, 17, 3998, 17]
    assert tokenizer.decode(ids) == "w0 w17 w3998 w17"
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert (tokenizer.eos_token, len(tokenizer)) == ("w3999", 4000)


# ------------------------------------------------------------------ what comes of it


def run_of(mode: str, repeat: int, itl: float, **changed: Any) -> dict[str, Any]:
    parts = {name: dict.fromkeys(STATISTICS, 10.0) for name in LATENCIES}
    return {
        **{"dataset": "random", "rate": 4.0, "concurrency": None, "requests": 2},
        **{"mode": mode, "repeat": repeat, "failed": 0, "errors": []},
        **{"requests_per_s": 4.0, "tokens_per_s": 100.0, "mean_in_flight": 1.0},
        **{"input_tokens": 9, "output_tokens": 8, "cached_tokens": 0, "lane": None},
        **{"client_cpu_s": 0.5, "duration_s": 2.0},
        **{**parts, "itl_ms": dict.fromkeys(STATISTICS, itl)},
        **{"digests": ["a", "b"]},
        **changed,
    }


MODES = ("stock", "resident")


def test_ratios_are_taken_within_a_repeat() -> None:
    runs = [
        *(run_of("stock", 0, 10.0), run_of("resident", 0, 5.0)),
        *(run_of("resident", 1, 20.0), run_of("stock", 1, 20.0)),
        run_of("stock", 2, 1.0),
    ]
    stock, resident = summarise(runs, MODES, "stock")["rows"]
    assert (stock["repeats"], stock["over_stock"]) == (2, {})
    assert resident["over_stock"]["itl_ms.p50"]["per_repeat"] == [0.5, 1.0]
    assert resident["itl_ms.p99"]["median"] == 12.5
    assert set(METRICS) <= set(resident) and set(resident["over_stock"]) == set(METRICS)


def test_answers_that_differ_are_counted() -> None:
    runs = [run_of("stock", 0, 1.0), run_of("resident", 0, 1.0, digests=["a", "x"])]
    rows = summarise(runs, MODES, "stock")["rows"]
    assert rows[1]["answers"] == {"compared": 2, "differing": 1, "first_requests": [1]}


def test_loads_are_not_mixed_and_keep_their_order() -> None:
    loads: list[dict[str, Any]] = [
        {"dataset": "sharegpt"},
        {"rate": None, "concurrency": 8},
        {"rate": 16.0},
        {},
        {"requests": 3, "digests": ["a", "b", "c"]},
    ]
    runs = [run_of(mode, 0, 1.0, **load) for load in loads for mode in MODES]
    rows = summarise(runs, MODES, "stock")["rows"][::2]
    assert [(row["dataset"], row["rate"], row["concurrency"], row["requests"]) for row in rows] == [
        *(("random", 4.0, None, 2), ("random", 4.0, None, 3), ("random", 16.0, None, 2)),
        *(("random", None, 8, 2), ("sharegpt", 4.0, None, 2)),
    ]


def test_a_row_of_a_table_has_a_cell_for_each_column() -> None:
    rows = summarise([run_of(mode, 0, 1.0) for mode in MODES], MODES, "stock")["rows"]
    assert len(row_cells(rows[0])) == len(FIGURES)
    assert row_cells(rows[1])[:3] == ["random, 4/s", "resident", "2"]
    assert len(ratio_cells(rows[1])) == 2 + len(SHOWN)


def test_a_plot_has_a_row_for_each_dataset_and_kind_of_load(tmp_path: Path) -> None:
    loads: list[dict[str, Any]] = [{}, {"rate": 16.0}, {"rate": None, "concurrency": 8}, {"dataset": SHARED}]
    runs = [run_of(mode, 0, 1.0, **load) for load in loads for mode in MODES]
    summary = summarise(runs, MODES, "stock")
    found = groups(summary["rows"])
    assert list(found) == [("random", "rate"), ("random", "concurrency"), (SHARED, "rate")]
    lines = lines_by_mode(found["random", "rate"], "rate", "itl_ms.p50")
    assert [place for place, _ in lines["resident"]] == [4.0, 16.0]
    draw(summary, "title", tmp_path / "bench_serving.png")
    assert (tmp_path / "bench_serving.png").read_bytes().startswith(b"\x89PNG")
