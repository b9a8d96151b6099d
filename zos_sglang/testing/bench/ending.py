"""How a measurement ends that is asked to by a signal: its servers are stopped, and no traceback is left."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

#: Exit code of a command that could not run, or could not do what it was asked for.
COULD_NOT = 2
Result = TypeVar("Result")


@contextmanager
def exiting_on(*kinds: signal.Signals) -> Iterator[None]:
    """Let these signals end us by SystemExit: a time limit from outside must stop the servers too."""
    with _handling(lambda *_: sys.exit(COULD_NOT), *kinds):
        yield


def run_until_ended(work: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, but SIGTERM cancels the work and raises SystemExit once it has come to its end.

    An exception that a handler raises lands in whichever task runs at that moment; asyncio keeps it there and
    prints it. For the main thread.
    """
    ended = False

    async def watched() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(*_: object) -> None:
            nonlocal ended
            ended = True
            loop.call_soon_threadsafe(task.cancel)

        with _handling(end, signal.SIGTERM):
            return await work

    try:
        return asyncio.run(watched())
    finally:
        if ended:  # and what else went wrong comes of it
            sys.exit(COULD_NOT)


@contextmanager
def _handling(handler: Callable[..., object], *kinds: signal.Signals) -> Iterator[None]:
    before = {kind: signal.signal(kind, handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, old in before.items():
            signal.signal(kind, old)
