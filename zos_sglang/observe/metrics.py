"""Metrics in batches: what step records and the two accounts add to the Prometheus families.

What it takes to make the families (`Classes`) is injected, so nothing here imports `prometheus_client`.
Every value of a closed enumeration is there at 0 from the start: a dashboard tells "never happened" from
"not measured".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from zos_sglang.observe.adjacent import pairs
from zos_sglang.observe.metric_families import FAMILIES, Family, Kind
from zos_sglang.observe.names import COLUMNS, MODES, Forward, Work, code, word
from zos_sglang.observe.record import STEP

if TYPE_CHECKING:
    from zos_sglang.overlap.account import Account
    from zos_sglang.resident.account import LaneAccount

_NS = 1e9

#: What an interval needs of a record: pairing whole records would copy each twice.
_LAUNCH = np.dtype([(name, STEP[name]) for name in ("step", "t_forward", "mode", "path", "forward", "flags")])


@dataclass(frozen=True, slots=True)
class Classes:
    """How a family is made: `prometheus_client`'s classes, or others with the same calls."""

    counter: Callable[..., Any]
    gauge: Callable[..., Any]
    histogram: Callable[..., Any]


class Metrics:
    """The families of one scheduler process, each with all its label values.

    Args:
        classes: makes the families.
        labels: labels of all series, by name; one that a family has itself yields to the family's.
    """

    def __init__(self, classes: Classes, labels: Mapping[str, object]) -> None:
        self._series = {family.name: _make(family, classes, labels) for family in FAMILIES}
        self._bounds = {family.name: np.array(family.bounds) for family in FAMILIES}
        self._before: dict[tuple[str, ...], int] = {}
        self._newest = np.zeros((), _LAUNCH)  # of step 0: adjacent to none
        self._mode: str | None = None

    def take(self, records: np.ndarray, account: Account, lane: LaneAccount, mode: str) -> None:
        """Add what is new.

        Args:
            records: dtype `record.STEP`, in order; those after the records of the last call.
            account: counts since the start of the process; what they grew by is added.
            lane: the same of the lane.
            mode: the mode in effect, one of `names.MODES`.
        """
        if records.size:
            self._take_steps(records)
            self._take_intervals(records)
        self._take_account(account)
        self._take_lane(lane)
        self._take_mode(mode)

    # ------------------------------------------------------------ records

    def _take_steps(self, records: np.ndarray) -> None:
        self._count("zos_steps_total", records, ("path", "forward"))
        self._count("zos_step_tokens_total", records, ("path", "forward"), records["tokens"])
        self._count("zos_steps_not_overlapped_total", records, ("reason",))
        self._count("zos_blocked_steps_total", records, ("block",))
        self._count("zos_blocked_seconds_total", records, ("block",), records["blocked"] / _NS)
        for work in Work:
            spent = np.maximum(records[f"cpu_{work}"], 0).sum() / _NS
            self._series["zos_scheduler_cpu_seconds_total"][(work.value,)].inc(float(spent))
        self._observe("zos_result_wait_seconds", records["wait"])
        self._observe("zos_gpu_step_seconds", records["gpu"])
        self._series["zos_result_queue_depth"][()].set(float(records["depth"][-1]))

    def _take_intervals(self, records: np.ndarray) -> None:
        """Pairs of the last call's newest record and the first of these included."""
        steps = np.zeros(records.size + 1, _LAUNCH)
        steps[0] = self._newest
        for name in _LAUNCH.names or ():
            steps[name][1:] = records[name]
        self._newest = steps[-1]
        before, after = pairs(steps)
        counts = after["forward"] == code("forward", Forward.DECODE)
        counts &= (before["t_forward"] > 0) & (after["t_forward"] > 0)
        between, paths = (after["t_forward"] - before["t_forward"])[counts], after["path"][counts]
        for number in np.unique(paths):
            path = word("path", int(number))
            if path is not None:
                self._observe("zos_launch_interval_seconds", between[paths == number], path)

    def _count(
        self, name: str, records: np.ndarray, columns: tuple[str, ...], weights: np.ndarray | None = None
    ) -> None:
        """Add the records, or their weights, by the words of `columns`; below 0 (unknown) counts nothing."""
        sizes = tuple(len(COLUMNS[column]) + 1 for column in columns)
        places = np.ravel_multi_index(tuple(records[column] for column in columns), sizes)
        sums = np.bincount(places, None if weights is None else np.maximum(weights, 0))
        for place in np.flatnonzero(sums):
            numbers = np.unravel_index(place, sizes)
            words = tuple(word(column, int(n)) for column, n in zip(columns, numbers, strict=True))
            series = self._series[name].get(words)  # a step that overlapped, or was not held up, has none
            if series is not None:
                series.inc(float(sums[place]))

    def _observe(self, name: str, nanoseconds: np.ndarray, *words: str) -> None:
        known = nanoseconds[nanoseconds >= 0]
        if known.size:
            observe_all(self._series[name][words], self._bounds[name], known / _NS)

    # ------------------------------------------------------------ accounts

    def _take_account(self, account: Account) -> None:
        paths = account.paths
        self._grow("zos_stalls_total", paths["stalls"])
        self._grow("zos_mode_switches_total", paths["mode-switches"])
        self._grow("zos_fallbacks_total", paths["fallbacks"], "loop")

    def _take_lane(self, lane: LaneAccount) -> None:
        self._grow("zos_lane_entries_total", lane.opened)
        self._grow("zos_lane_tokens_total", lane.row_steps)
        self._grow("zos_lane_wasted_tokens_total", lane.wasted_row_steps)
        self._grow("zos_lane_rows_left_total", lane.rows_left)
        self._grow("zos_fallbacks_total", lane.faults, "lane")
        for departure, times in lane.left.items():
            self._grow("zos_lane_exits_total", times, departure.value)
        for refusal, times in lane.refused.items():
            self._grow("zos_lane_refusals_total", times, refusal.value)

    def _grow(self, name: str, now: int, *words: str) -> None:
        grown = now - self._before.get((name, *words), 0)
        if grown > 0:
            self._series[name][words].inc(grown)
            self._before[(name, *words)] = now

    def _take_mode(self, mode: str) -> None:
        if mode == self._mode:
            return
        for name in MODES:
            self._series["zos_mode"][(name,)].set(float(name == mode))
        self._mode = mode


def observe_all(histogram: Any, bounds: np.ndarray, seconds: np.ndarray) -> None:
    """What one `observe` a value does, in as many writes as there are buckets to grow.

    Args:
        histogram: one series of a histogram. `prometheus_client` keeps its buckets and its sum in two
            private attributes; where they are not found as expected, every value is observed.
        bounds: upper bounds of its buckets in order, without infinity.
        seconds: the values.
    """
    buckets, total = getattr(histogram, "_buckets", None), getattr(histogram, "_sum", None)
    if total is None or not isinstance(buckets, list) or len(buckets) != len(bounds) + 1:
        for value in seconds.tolist():
            histogram.observe(value)
        return
    places = np.bincount(np.searchsorted(bounds, seconds, side="left"))  # a bound belongs to its bucket
    for place in np.flatnonzero(places):
        buckets[place].inc(int(places[place]))
    total.inc(float(seconds.sum()))


def _make(family: Family, classes: Classes, labels: Mapping[str, object]) -> dict[tuple[Any, ...], Any]:
    """All series of a family, by the values of its own labels in order."""
    common = {name: value for name, value in labels.items() if name not in family.labels}
    names = [*common, *family.labels]
    match family.kind:
        case Kind.COUNTER:
            made = classes.counter(family.name, family.help, names)
        case Kind.GAUGE:
            made = classes.gauge(family.name, family.help, names, multiprocess_mode="mostrecent")
        case Kind.HISTOGRAM:
            made = classes.histogram(family.name, family.help, names, buckets=family.bounds)
    series = {}
    for values in product(*family.labels.values()):
        series[values] = (
            made.labels(**common, **dict(zip(family.labels, values, strict=True))) if names else made
        )
        if family.kind is Kind.GAUGE:
            series[values].set(0.0)  # a gauge that was never set is not shown
    return series
