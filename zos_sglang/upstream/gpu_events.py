"""Which events time a scheduler's device, and on which of its streams."""

from __future__ import annotations

from functools import partial
from typing import Any

from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.upstream.releases import copies_elsewhere


def is_asynchronous(scheduler: Any) -> bool:
    """Whether a forward may still run when its call has returned: whether there are events to wait for.

    The events of a plain CPU are placeholders: always done.
    """
    return getattr(scheduler.device_module.Event, "__module__", "") != "torch.cpu"


def make_gpu_clock(scheduler: Any) -> GpuClock | None:
    """A clock over the scheduler's streams; None where events cannot be timed."""
    if not is_asynchronous(scheduler):
        return None
    new_event = partial(scheduler.device_module.Event, enable_timing=True)
    try:
        if not hasattr(new_event(), "elapsed_time"):
            return None
    except TypeError:
        return None
    clock = GpuClock(new_event)
    follow(clock, scheduler, normal=False)
    return clock


def follow(clock: GpuClock, scheduler: Any, *, normal: bool) -> None:
    """Time the streams of the loop that runs now; `normal`: SGLang's loop without overlap, which uses one."""
    clock.forward = scheduler.schedule_stream if normal else scheduler.forward_stream
    # Another thread queues these copies: when, an event of ours cannot tell.
    elsewhere = normal or copies_elsewhere(scheduler)
    clock.copy = None if elsewhere else scheduler.copy_stream
