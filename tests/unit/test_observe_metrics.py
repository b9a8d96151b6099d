"""Metrics with the real `prometheus_client` in multiprocess mode: what is scraped is what happened."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.made_records import MS, records, steady
from tests.unit.prometheus_case import LABELS, Scrape, classes, multiprocess
from zos_sglang.observe.metric_families import FAMILIES, Kind
from zos_sglang.observe.metrics import Metrics, observe_all
from zos_sglang.observe.names import AFTER_IDLE, COLUMNS, Block, Forward
from zos_sglang.observe.names import Path as StepPath
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.guards import Reason
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Departure, Refusal

NOTHING = records(0)


@pytest.fixture
def scrape(tmp_path: Path) -> Iterator[Scrape]:
    with multiprocess(tmp_path) as found:
        yield found


@pytest.fixture
def metrics(scrape: Scrape) -> Metrics:
    return Metrics(classes(), LABELS)


def take(metrics: Metrics, taken: np.ndarray, mode: str = "overlap") -> None:
    metrics.take(taken, Account(), LaneAccount(), mode)


# ------------------------------------------------------------ families


def test_every_label_value_is_there_at_zero_from_the_start(metrics: Metrics, scrape: Scrape) -> None:
    found = scrape.samples()
    assert set(found.values()) == {0.0}
    series = {(name, frozenset(dict(labels).items())) for name, labels in found}
    for family in FAMILIES:
        name = family.name + ("_count" if family.kind is Kind.HISTOGRAM else "")
        for values in product(*family.labels.values()):
            assert (name, frozenset(zip(family.labels, values, strict=True))) in series


def test_labels_hold_the_whole_enumerations() -> None:
    labels = {family.name: family.labels for family in FAMILIES}
    assert set(labels["zos_steps_total"]["path"]) == set(StepPath)
    assert set(labels["zos_steps_total"]["forward"]) == set(Forward)
    assert set(labels["zos_blocked_steps_total"]["cause"]) == set(Block)
    assert set(labels["zos_steps_not_overlapped_total"]["reason"]) == set(Reason) - {Reason.OVERLAPPED}
    assert set(labels["zos_lane_exits_total"]["reason"]) == set(Departure)
    assert set(labels["zos_lane_refusals_total"]["reason"]) == set(Refusal)
    assert set(labels["zos_mode"]["mode"]) == set(COLUMNS["mode"])


def test_names_labels_and_help_follow_the_conventions_of_prometheus() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert re.fullmatch(r"zos(_[a-z]+)+", family.name)
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert not re.search(
            r"_(ms|us|ns|milliseconds|microseconds|minutes|count|sum|bucket)(_|$)", family.name
        )
        assert family.kind is not Kind.HISTOGRAM or family.name.endswith("_seconds")
        assert not re.search(r"_(counter|gauge|histogram)(_|$)", family.name)
        assert re.fullmatch(r"[A-Z1][^\n]{20,}\.", family.help), family.help
        for label, values in family.labels.items():
            assert re.fullmatch(r"[a-z]+(_[a-z]+)*", label) and label not in {
                "le",
                "quantile",
                "job",
                "instance",
            }
            assert label not in family.name.removesuffix("_total").split("_") or label == "mode"
            assert all(re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", value) for value in values)
        bounds = family.bounds
        assert bool(bounds) == (family.kind is Kind.HISTOGRAM) and list(bounds) == sorted(set(bounds))


def test_the_exposition_carries_type_and_help(metrics: Metrics, scrape: Scrape) -> None:
    lines = scrape.text().splitlines()
    for family in FAMILIES:
        assert f"# HELP {family.name} {family.help}" in lines
        assert f"# TYPE {family.name} {family.kind}" in lines


# ------------------------------------------------------------ records


def test_steps_and_tokens_are_counted_by_path_and_forward(metrics: Metrics, scrape: Scrape) -> None:
    take(metrics, records(5, path=["sync", "overlap", "overlap", "resident", "resident-blocked"], tokens=7))
    take(metrics, records(3, path="overlap", forward=["decode", "extend", "extend"], tokens=[1, 100, 200]))
    assert scrape.value("zos_steps_total", path="overlap", forward="decode") == 3
    assert scrape.value("zos_steps_total", path="overlap", forward="extend") == 2
    assert scrape.value("zos_steps_total", path="resident-blocked", forward="decode") == 1
    assert scrape.value("zos_step_tokens_total", path="overlap", forward="extend") == 300
    assert scrape.value("zos_step_tokens_total", path="overlap", forward="decode") == 15
    assert scrape.value("zos_steps_total", path="sync", forward="mixed") == 0


def test_reasons_leave_out_steps_that_overlapped(metrics: Metrics, scrape: Scrape) -> None:
    take(metrics, records(4, reason=["overlapped", "first-token", "nothing-pending", "first-token"]))
    grown = {labels: value for (name, labels), value in scrape.samples().items() if "not_overlapped" in name}
    assert {dict(labels)["reason"]: n for labels, n in grown.items() if n} == {
        "first-token": 2,
        "nothing-pending": 1,
    }


def test_blocked_steps_carry_their_time(metrics: Metrics, scrape: Scrape) -> None:
    take(metrics, records(4, block=["copy", 0, "copy", "cpu-bound"], blocked=[2 * MS, -1, 3 * MS, -1]))
    assert scrape.value("zos_blocked_steps_total", cause="copy") == 2
    assert scrape.value("zos_blocked_seconds_total", cause="copy") == pytest.approx(0.005)
    assert scrape.value("zos_blocked_steps_total", cause="cpu-bound") == 1
    assert scrape.value("zos_blocked_seconds_total", cause="cpu-bound") == 0


def test_cpu_time_is_summed_by_class_where_it_is_known(metrics: Metrics, scrape: Scrape) -> None:
    take(metrics, records(3, cpu_prepare=[MS, 2 * MS, -1], cpu_process=MS, cpu_forward=50 * MS))
    assert scrape.value("zos_scheduler_cpu_seconds_total", work="prepare") == pytest.approx(0.003)
    assert scrape.value("zos_scheduler_cpu_seconds_total", work="process") == pytest.approx(0.003)
    assert scrape.value("zos_scheduler_cpu_seconds_total", work="depends") == 0


def test_unknown_durations_are_not_observed(metrics: Metrics, scrape: Scrape) -> None:
    take(metrics, records(5, wait=[-1, 0, MS, 40 * MS, -1], gpu=[-1, -1, 3 * MS, -1, -1]))
    assert scrape.value("zos_result_wait_seconds_count") == 3
    assert scrape.value("zos_result_wait_seconds_sum") == pytest.approx(0.041)
    assert scrape.value("zos_result_wait_seconds_bucket", le="0.001") == 2
    assert scrape.value("zos_gpu_step_seconds_count") == 1


def test_intervals_are_of_adjacent_decode_steps_only(metrics: Metrics, scrape: Scrape) -> None:
    made = steady(10, gpu=4, cpu=1)
    made["t_forward"][5] = 0  # not known
    made["flags"][3] = AFTER_IDLE
    made["forward"][7] = COLUMNS["forward"].index(Forward.EXTEND) + 1
    take(metrics, made)
    assert scrape.value("zos_launch_interval_seconds_count", path="overlap") == 9 - 1 - 2 - 2
    assert scrape.value("zos_launch_interval_seconds_sum", path="overlap") == pytest.approx(4 * 0.004)
    assert scrape.value("zos_launch_interval_seconds_count", path="sync") == 0


def test_an_interval_across_two_calls_counts(metrics: Metrics, scrape: Scrape) -> None:
    made = steady(6, gpu=4, cpu=1)
    for first in range(6):
        take(metrics, made[first : first + 1])
        take(metrics, NOTHING)
    assert scrape.value("zos_launch_interval_seconds_count", path="overlap") == 5


def test_the_depth_is_that_of_the_newest_launch(metrics: Metrics, scrape: Scrape) -> None:
    take(metrics, records(3, depth=[1, 1, 0]))
    assert scrape.value("zos_result_queue_depth") == 0
    take(metrics, records(2, depth=[0, 1]))
    take(metrics, NOTHING)
    assert scrape.value("zos_result_queue_depth") == 1


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.integers(1, 60), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_counts_are_those_of_the_records_however_they_come(
    data: st.DataObject, count: int, cuts: list[int]
) -> None:
    def words(column: str, none: bool = False) -> list[int]:
        numbers = st.integers(0 if none else 1, len(COLUMNS[column]))
        return data.draw(st.lists(numbers, min_size=count, max_size=count))

    made = steady(count, gpu=2, cpu=1, path=words("path"), block=words("block", none=True))
    made["reason"], made["forward"] = words("reason"), words("forward")
    made["forward"][data.draw(st.integers(0, count)) :] = COLUMNS["forward"].index(Forward.DECODE) + 1
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    with tempfile.TemporaryDirectory() as folder, multiprocess(Path(folder)) as scrape:
        metrics = Metrics(classes(), LABELS)
        for first, last in pairwise(edges):
            take(metrics, made[first:last])
        found = scrape.samples()

    def grown(name: str) -> dict[frozenset[str], float]:
        values = {
            frozenset(dict(labels).values()): n for (sample, labels), n in found.items() if sample == name
        }
        return {words: n for words, n in values.items() if n}

    def counted(*columns: str) -> Counter[frozenset[str]]:
        numbers = zip(*(made[column].tolist() for column in columns), strict=True)
        return Counter(
            frozenset(str(COLUMNS[column][n - 1]) for column, n in zip(columns, row, strict=True))
            for row in numbers
            if all(row)
        )

    assert grown("zos_steps_total") == counted("path", "forward")
    reasons = counted("reason")
    del reasons[frozenset({"overlapped"})]
    assert grown("zos_steps_not_overlapped_total") == reasons
    assert grown("zos_blocked_steps_total") == counted("block")
    decode = COLUMNS["forward"].index(Forward.DECODE) + 1
    adjacent = sum(before["forward"] == after["forward"] == decode for before, after in pairwise(made))
    assert sum(grown("zos_launch_interval_seconds_count").values()) == adjacent


BOUNDS = (0.001, 0.002, 0.5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from((0.0, *BOUNDS)) | st.floats(0, 2), max_size=50))
def test_a_bulk_update_is_one_observe_a_value(seconds: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder, multiprocess(Path(folder)) as scrape:
        made = classes().histogram("zos_seconds", "A histogram.", [*LABELS, "how"], buckets=BOUNDS)
        one, bulk = (made.labels(**LABELS, how=how) for how in ("one", "bulk"))
        for value in seconds:
            one.observe(value)
        observe_all(bulk, np.array(BOUNDS), np.array(seconds))
        found: dict[str, dict[tuple[str, str], float]] = {"one": {}, "bulk": {}}
        for (name, labels), value in scrape.samples().items():
            known = dict(labels)
            found[known["how"]][name, known.get("le", "")] = value
    assert found["one"] == pytest.approx(found["bulk"], rel=1e-12, abs=1e-12) and len(found["one"]) == 6


def test_a_bulk_update_takes_few_writes_and_needs_no_observe() -> None:
    histogram = classes().histogram("zos_seconds", "A histogram.", ["how"], buckets=BOUNDS).labels("bulk")
    histogram.observe = None
    observe_all(histogram, np.array(BOUNDS), np.full(1000, 0.0015))
    assert [bucket.get() for bucket in histogram._buckets] == [0, 1000, 0, 0]


def test_a_histogram_of_another_make_observes_every_value() -> None:
    seen: list[float] = []
    observe_all(SimpleNamespace(observe=seen.append), np.array(BOUNDS), np.array([0.1, 0.2]))
    assert seen == [0.1, 0.2]


# ------------------------------------------------------------ accounts and mode


def test_accounts_add_what_they_grew_by(metrics: Metrics, scrape: Scrape) -> None:
    account, lane = Account(), LaneAccount()
    account.paths["stalls"] = 2
    lane.opened, lane.row_steps, lane.left[Departure.INTAKE] = 3, 100, 2
    metrics.take(NOTHING, account, lane, "resident")
    metrics.take(NOTHING, account, lane, "resident")
    account.paths["fallbacks"], lane.faults, lane.row_steps, lane.wasted_row_steps = 1, 2, 130, 4
    lane.rows_left = 6
    lane.left[Departure.INTAKE], lane.refused[Refusal.GRAMMAR] = 5, 7
    account.paths["mode-switches"] = 1
    metrics.take(records(1), account, lane, "resident")
    assert scrape.value("zos_stalls_total") == 2
    assert scrape.value("zos_lane_entries_total") == 3
    assert scrape.value("zos_lane_tokens_total") == 130
    assert scrape.value("zos_lane_wasted_tokens_total") == 4
    assert scrape.value("zos_lane_rows_left_total") == 6
    assert scrape.value("zos_lane_exits_total", reason="intake") == 5
    assert scrape.value("zos_lane_exits_total", reason="finish") == 0
    assert scrape.value("zos_lane_refusals_total", reason="grammar") == 7
    assert scrape.value("zos_fallbacks_total", part="loop") == 1
    assert scrape.value("zos_fallbacks_total", part="lane") == 2
    assert scrape.value("zos_mode_switches_total") == 1


def test_one_mode_is_in_effect(metrics: Metrics, scrape: Scrape) -> None:
    for mode in ("overlap", "resident", "normal", "off"):
        take(metrics, NOTHING, mode)
        values = {one: scrape.value("zos_mode", mode=one) for one in COLUMNS["mode"]}
        assert values == dict.fromkeys(COLUMNS["mode"], 0.0) | {mode: 1.0}
