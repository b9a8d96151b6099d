"""What `ZOS_WAIT` makes of the events for which the scheduler thread waits.

On an H200's host, a virtual machine, the Python behind a wait takes 1.25 times as long as on a thread that
never waits, after sleeping and after the driver's spinning alike; a prefill's launch takes 1.4 to 1.6 times
as long in the lane as in SGLang's own loop. Polling from Python keeps the thread at instructions of its own.
Whether that keeps the core at speed is to be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class PolledEvent(torch.cuda.Event):
    """A CUDA event whose `synchronize` asks, from Python, until it is there.

    A query holds the interpreter: other threads of the process get it at Python's switch interval only.
    """

    def synchronize(self) -> None:
        while not self.query():
            pass


def event_maker(event: Callable[..., Any], wait: str) -> Callable[[], Any]:
    """What makes the events of a device whose own kind is `event`, to be waited for in the way `wait`."""
    if event is not torch.cuda.Event:
        return event  # other devices' events know one way
    if wait == "poll":
        return PolledEvent
    return partial(event, blocking=wait == "block")
