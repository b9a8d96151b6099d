"""Our metrics beside SGLang's own: same registry, same labels, same condition."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from zos_sglang.observe.metrics import Classes, Metrics

logger = logging.getLogger(__name__)

Sink = Callable[[np.ndarray], None]

#: Upstream's collector with the families beside it, of which there is one in a process. A server that changes
#: its role asks a second time, and families are registered for good.
_made: list[tuple[Any, Metrics]] = []


def make_metrics(scheduler: Any, runtime: Any = None) -> Sink | None:
    """What takes new step records into `/metrics`, or None where SGLang's metrics are off for this process.

    The sink takes records of dtype `record.STEP` that it has not seen; it is called about once a second,
    also with no records, so that counts and the mode are right on an idle server. A further call for the
    same collector goes on in the same families.

    Args:
        scheduler: upstream's scheduler.
        runtime: whose accounts and mode are shown; this process's own by default.
    """
    if runtime is None:
        from zos_sglang.upstream.runtime import runtime
    if not scheduler.metrics_reporter.current_scheduler_metrics_enabled:
        return None
    try:
        metrics = _metrics_beside(scheduler.metrics_collector)
    except Exception:
        logger.exception("zos-sglang: no zos_* metrics")
        return None

    def zos_metrics(records: np.ndarray) -> None:
        metrics.take(records, runtime.account, runtime.lane_account, runtime.mode)

    return zos_metrics


def _metrics_beside(collector: Any) -> Metrics:
    for known, metrics in _made:
        if known is collector:
            return metrics
    metrics = Metrics(_classes(collector), _labels(collector))
    _made.append((collector, metrics))
    return metrics


def _classes(collector: Any) -> Classes:
    """The classes of upstream's collector: those injected into it (Ray), else `prometheus_client`'s."""
    # Not above: the first import decides where values live, by a variable that SGLang sets for its processes.
    import prometheus_client

    return Classes(
        counter=getattr(collector, "_counter_cls", None) or prometheus_client.Counter,
        gauge=getattr(collector, "_gauge_cls", None) or prometheus_client.Gauge,
        histogram=getattr(collector, "_histogram_cls", None) or prometheus_client.Histogram,
    )


def _labels(collector: Any) -> dict[str, object]:
    """Upstream's labels without `priority`: it is empty where a count is of all priorities, as ours are."""
    return {name: value for name, value in collector.labels.items() if name != "priority"}
