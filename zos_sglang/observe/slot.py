"""One launch under way: its record in the making.

A plain list, because it is built and filled on every step: one instruction makes it, and a field costs a
store. Its fields are those of `record.STEP` in their order, words still as words, and behind them what is
needed to complete them.
"""

from __future__ import annotations

from typing import Any

from zos_sglang.observe.names import CODES, Block, Path, Ready, code
from zos_sglang.observe.record import STEP
from zos_sglang.overlap.guards import Reason

Slot = list[Any]

_AT = {name: place for place, name in enumerate(STEP.names or ())}
FIELDS = len(_AT)

STEP_NUMBER, T_FORWARD, T_PROCESS, T_READY, T_OUTPUT = (
    _AT[name] for name in ("step", "t_forward", "t_process", "t_ready", "t_output")
)
WALL, CPU, CPU_PREPARE, CPU_READBACK, CPU_PROCESS, CPU_DEPENDS, CPU_FORWARD, WAIT, BLOCKED = (
    _AT[name]
    for name in (
        *("wall", "cpu", "cpu_prepare", "cpu_readback", "cpu_process", "cpu_depends", "cpu_forward"),
        *("wait", "blocked"),
    )
)
PATH, REASON, BLOCK, BARRIER, DEPTH, READY = (
    _AT[name] for name in ("path", "reason", "block", "barrier", "depth", "ready")
)
#: Behind the fields: the event of the result (None: there is none yet); the slot of the launch before;
#: whether the lane launched it; when its forward returned.
EVENT, PENDING, RESIDENT, T_DONE = range(FIELDS, FIELDS + 4)

WAITED, AT_PROCESS, UNSEEN = (code("ready", r) for r in (Ready.WAITED, Ready.AT_PROCESS, Ready.UNSEEN))
AT_BEGIN, AT_LAUNCH = code("ready", Ready.AT_BEGIN), code("ready", Ready.AT_LAUNCH)

_REASONS = CODES["reason"]
_BARRIERS: dict[Any, int] = {None: 0, **CODES["barrier"]}
_BLOCKS: dict[Any, int] = {None: 0, **CODES["block"]}
_CPU_BOUND = code("block", Block.CPU_BOUND)
_SYNC = code("path", Path.SYNC)
#: By whether it was a step of the lane: plain, blocked.
_PATHS = {
    False: (code("path", Path.OVERLAP), code("path", Path.OVERLAP_BLOCKED)),
    True: (code("path", Path.RESIDENT), code("path", Path.RESIDENT_BLOCKED)),
}
_OVERLAPS = frozenset((str(Reason.OVERLAPPED), str(Reason.NOTHING_PENDING)))


def give_up(slot: Slot) -> None:
    """Nobody of ours processed the result, so what is known of it means nothing."""
    slot[READY], slot[WAIT] = UNSEEN, -1
    slot[T_PROCESS] = slot[T_READY] = slot[T_OUTPUT] = 0


def complete(slot: Slot, asynchronous: bool) -> None:
    """Words to numbers, and what follows from what was stamped. Raises KeyError for an unknown word."""
    if not slot[READY]:
        # Nobody waited. On a synchronous device the result was there when the forward returned.
        slot[READY] = AT_PROCESS if asynchronous else WAITED
        slot[T_READY] = slot[T_OUTPUT] if asynchronous else slot[T_DONE]
    reason, resident, pending = slot[REASON], slot[RESIDENT], slot[PENDING]
    slot[PENDING] = slot[EVENT] = None  # else each slot would keep all before it
    slot[REASON], slot[BARRIER] = _REASONS[reason], _BARRIERS[slot[BARRIER]]
    block = _BLOCKS[slot[BLOCK]]
    if not resident and reason not in _OVERLAPS:
        slot[PATH], slot[BLOCK], slot[BLOCKED] = _SYNC, 0, -1
        return
    if not block and pending is not None and slot[DEPTH] and pending[READY] in (AT_BEGIN, AT_LAUNCH):
        # The device had nothing to do at least since the result before was seen there.
        block = _CPU_BOUND
        slot[BLOCKED] = max(slot[T_FORWARD] - pending[T_READY], 0)
    slot[BLOCK] = block
    slot[PATH] = _PATHS[resident][block > 0]
