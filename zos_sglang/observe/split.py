"""Whose time it was: the thread's CPU over some iterations, split by iteration and class of work."""

from __future__ import annotations

from collections.abc import Sequence

from zos_sglang.observe.slot import (
    CPU,
    CPU_DEPENDS,
    CPU_FORWARD,
    CPU_PREPARE,
    CPU_PROCESS,
    CPU_READBACK,
    WALL,
    Slot,
)

#: One iteration of the loop: whom its time is for (the launch of this iteration, else the result that it
#: processed; None: nobody), and in ns: wall, waiting for results, readback, processing, what depends on the
#: sample, forward; the last two of the thread clock, of forward and wait, -1 where they were not read. The
#: stretches lie apart from each other and from the waits in them.
Iteration = tuple[Slot | None, int, int, int, int, int, int, int, int]


def charge(iterations: Sequence[Iteration], cpu: int, asynchronous: bool) -> None:
    """Add wall time and CPU to the slots of adjacent iterations, between whose ends the thread burnt `cpu`.

    By the shares of wall time without waits, so all parts sum to `cpu` exactly; wrong as far as the thread
    lost the processor in one stretch only. A thread that sleeps while it waits burns nothing there; what it
    burnt beyond its own time, it burnt waiting, and that is readback. What no stretch claims is preparation.
    """
    waited = own = 0
    for it in iterations:
        waited += it[2]
        own += it[1] - it[2]
    burnt = max(cpu - own, 0)
    rest, left, left_burnt = cpu - burnt, cpu, burnt
    last = len(iterations) - 1
    for place, it in enumerate(iterations):
        if place == last:
            mine, waiting = left, left_burnt
        else:
            waiting = burnt * it[2] // waited if waited else 0
            mine = waiting + (rest * (it[1] - it[2]) // own if own else 0)
            left -= mine
            left_burnt -= waiting
        if it[0] is not None:
            _split(it, mine, waiting, asynchronous)


def _split(it: Iteration, cpu: int, burnt: int, asynchronous: bool) -> None:
    slot, wall, waited, reading, process, depends, forward, cpu_forward, cpu_waited = it
    assert slot is not None
    own, cpu_of_forward = wall - waited, 0
    if cpu_forward >= 0:
        burnt, cpu_of_forward = cpu_waited, cpu_forward
        own -= forward
    rest = cpu - burnt - cpu_of_forward
    prepare = rest
    slot[WALL] += wall
    slot[CPU] += cpu
    slot[CPU_READBACK] += burnt
    if own > 0:
        if reading:
            part = rest * reading // own
            slot[CPU_READBACK] += part
            prepare -= part
        if process:
            part = rest * process // own
            slot[CPU_PROCESS] += part
            prepare -= part
        if depends:
            part = rest * depends // own
            slot[CPU_DEPENDS] += part
            prepare -= part
        if forward and not asynchronous and cpu_forward < 0:
            cpu_of_forward = rest * forward // own
            prepare -= cpu_of_forward
    slot[CPU_FORWARD] += cpu_of_forward
    slot[CPU_PREPARE] += prepare
