"""The Prometheus families of the plugin: names, help texts, labels with all their values, buckets.

Names follow Prometheus: base units, `_total` for counters, no colons (those are for recording rules).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from zos_sglang.observe.names import MODES, Block, Forward, Path, Work
from zos_sglang.overlap.guards import Reason
from zos_sglang.resident.eligibility import Departure, Refusal

#: Upper bounds of the buckets, in seconds: a step of a small model on a CPU up to a long one of a large one.
_STEP_BOUNDS = (
    *(0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
)
_WAIT_BOUNDS = (1e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)

#: Reasons of steps that did not overlap; `nothing-pending` is among them: there was nothing to overlap with.
NOT_OVERLAPPED = tuple(reason.value for reason in Reason if reason is not Reason.OVERLAPPED)

#: Who gave up and let the ordinary path go on: the event loop (a guard, our launch), or the lane.
PARTS = ("loop", "lane")


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family: its own labels with all their values, and bucket bounds of a histogram (s)."""

    kind: Kind
    name: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()


_PATHS = tuple(map(str, Path))
_BY_STEP = {"path": _PATHS, "forward": tuple(map(str, Forward))}
_CAUSES = {"cause": tuple(map(str, Block))}

FAMILIES: tuple[Family, ...] = (
    Family(
        Kind.COUNTER,
        "zos_steps_total",
        "Scheduler steps by the path they took and by forward mode.",
        _BY_STEP,
    ),
    Family(
        Kind.COUNTER,
        "zos_step_tokens_total",
        "Tokens computed by steps, those of prompts among them, by path and forward mode.",
        _BY_STEP,
    ),
    Family(
        Kind.COUNTER,
        "zos_steps_not_overlapped_total",
        "Steps that were not launched over a pending result, by reason;"
        " nothing-pending: there was no result to overlap with.",
        {"reason": NOT_OVERLAPPED},
    ),
    Family(
        Kind.COUNTER,
        "zos_blocked_steps_total",
        "Steps that overlapped while the scheduler thread was held up, by cause.",
        _CAUSES,
    ),
    Family(
        Kind.COUNTER,
        "zos_blocked_seconds_total",
        "Time for which steps that overlapped were held up, by cause; for cpu-bound a lower bound.",
        _CAUSES,
    ),
    Family(
        Kind.COUNTER,
        "zos_scheduler_cpu_seconds_total",
        "CPU time of the scheduler thread in iterations that launched a step, by class of work;"
        " a forward that runs on this thread is not counted.",
        {"work": tuple(map(str, Work))},
    ),
    Family(
        Kind.HISTOGRAM,
        "zos_result_wait_seconds",
        "Time for which the scheduler thread waited for the result of a step.",
        bounds=_WAIT_BOUNDS,
    ),
    Family(
        Kind.HISTOGRAM,
        "zos_launch_interval_seconds",
        "Time between the launches of two adjacent decode steps, by path of the second.",
        {"path": _PATHS},
        _STEP_BOUNDS,
    ),
    Family(
        Kind.HISTOGRAM,
        "zos_gpu_step_seconds",
        "Time of a step on the device, from events sampled every few steps.",
        bounds=_STEP_BOUNDS,
    ),
    Family(Kind.COUNTER, "zos_lane_entries_total", "Openings of the resident decode lane."),
    Family(
        Kind.COUNTER,
        "zos_lane_exits_total",
        "Departures from the resident decode lane, by reason.",
        {"reason": tuple(map(str, Departure))},
    ),
    Family(
        Kind.COUNTER,
        "zos_lane_refusals_total",
        "Launches, or a server's configuration, that the resident decode lane refused, by reason.",
        {"reason": tuple(map(str, Refusal))},
    ),
    Family(
        Kind.COUNTER,
        "zos_lane_tokens_total",
        "Tokens sampled in the resident decode lane, wasted ones among them.",
    ),
    Family(
        Kind.COUNTER,
        "zos_lane_wasted_tokens_total",
        "Tokens that the lane sampled for requests that had ended already.",
    ),
    Family(
        Kind.COUNTER,
        "zos_lane_rows_left_total",
        "Rows that left the resident decode lane while the others rode on.",
    ),
    Family(
        Kind.GAUGE,
        "zos_result_queue_depth",
        "Results that were pending at the newest launch.",
    ),
    Family(Kind.COUNTER, "zos_stalls_total", "Stalls of the event loop that were reported."),
    Family(
        Kind.COUNTER,
        "zos_fallbacks_total",
        "Faults of the plugin after which the ordinary path went on, by the part that failed.",
        {"part": PARTS},
    ),
    Family(Kind.COUNTER, "zos_mode_switches_total", "Changes of the scheduling mode while running."),
    Family(Kind.GAUGE, "zos_mode", "1 for the scheduling mode in effect, 0 for the others.", {"mode": MODES}),
)
