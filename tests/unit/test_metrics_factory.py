"""Our metrics beside SGLang's own collector: its labels, its classes, its condition."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.made_records import records
from tests.unit.prometheus_case import LABELS, Scrape, classes, multiprocess
from zos_sglang.overlap.account import Account
from zos_sglang.resident.account import LaneAccount
from zos_sglang.upstream.metrics_factory import make_metrics


@pytest.fixture
def scrape(tmp_path: Path) -> Iterator[Scrape]:
    with multiprocess(tmp_path) as found:
        yield found


def scheduler(enabled: bool = True, **labels: object) -> SimpleNamespace:
    """As much of a scheduler as `make_metrics` looks at; families in a registry of their own."""
    made = classes()
    collector = SimpleNamespace(
        labels=LABELS | labels,
        _counter_cls=made.counter,
        _gauge_cls=made.gauge,
        _histogram_cls=made.histogram,
    )
    return SimpleNamespace(
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=enabled),
        metrics_collector=collector,
    )


def runtime(mode: str = "overlap") -> SimpleNamespace:
    return SimpleNamespace(account=Account(), lane_account=LaneAccount(), mode=mode)


def test_without_metrics_of_sglang_there_are_none_of_ours(scrape: Scrape) -> None:
    assert make_metrics(scheduler(enabled=False), runtime()) is None
    assert scrape.samples() == {}


def test_the_sink_shows_the_runtime_as_it_is(scrape: Scrape) -> None:
    shown = runtime()
    sink = make_metrics(scheduler(priority=""), shown)
    assert sink is not None
    shown.mode, shown.lane_account.opened = "resident", 5
    sink(records(2))
    assert scrape.value("zos_mode", mode="resident") == 1
    assert scrape.value("zos_lane_entries_total") == 5
    assert scrape.value("zos_steps_total", path="overlap", forward="decode") == 2


def test_a_label_of_the_user_is_on_every_series_and_yields_to_ours(scrape: Scrape) -> None:
    sink = make_metrics(scheduler(cluster="north", path="mine"), runtime())
    assert sink is not None
    sink(records(2, path="sync"))
    assert scrape.value("zos_steps_total", path="sync", forward="decode", cluster="north") == 2
    assert scrape.value("zos_stalls_total", path="mine", cluster="north") == 0


def test_families_that_cannot_be_made_cost_the_metrics_only(
    scrape: Scrape, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = scheduler(), scheduler()
    second.metrics_collector = SimpleNamespace(**vars(first.metrics_collector))
    assert make_metrics(first, runtime()) is not None
    with caplog.at_level(logging.ERROR):
        assert make_metrics(second, runtime()) is None  # the names are taken
    assert "no zos_* metrics" in caplog.text


def test_a_scheduler_that_changes_its_role_goes_on_in_the_same_families(scrape: Scrape) -> None:
    once, shown = scheduler(), runtime()
    for role in range(2):
        sink = make_metrics(once, shown)
        assert sink is not None
        shown.account.passed("mode-switches")
        sink(records(3 + role))  # of a recorder of its own, which numbers steps from 1
    assert scrape.value("zos_steps_total", path="overlap", forward="decode") == 7
    assert scrape.value("zos_mode_switches_total") == 2


SCRIPT = """
from types import SimpleNamespace as Made
from tests.unit.made_records import records
from tests.unit.prometheus_case import LABELS
from zos_sglang.overlap.account import Account
from zos_sglang.resident.account import LaneAccount
from zos_sglang.upstream.metrics_factory import make_metrics

collector = Made(labels=LABELS, _counter_cls=None, _gauge_cls=None, _histogram_cls=None)
reporter = Made(current_scheduler_metrics_enabled=True)
shown = Made(account=Account(), lane_account=LaneAccount(), mode="stock")
make_metrics(Made(metrics_reporter=reporter, metrics_collector=collector), shown)(records(3))
"""


def test_another_process_finds_the_values_of_a_scheduler(tmp_path: Path) -> None:
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCRIPT], env=env, check=True, timeout=120)
    scrape = Scrape(tmp_path)
    assert scrape.value("zos_steps_total", path="overlap", forward="decode") == 3
    assert scrape.value("zos_mode", mode="stock") == 1


def test_sglang_still_has_the_parts_that_are_looked_at() -> None:
    from sglang.srt.observability.metrics_collector import (
        SchedulerMetricsCollector,
        SchedulerMetricsCollectorContext,
    )

    for name in ("_counter_cls", "_gauge_cls", "_histogram_cls"):
        assert getattr(SchedulerMetricsCollector, name) is None
    assert "current_scheduler_metrics_enabled" in SchedulerMetricsCollectorContext.__dataclass_fields__
