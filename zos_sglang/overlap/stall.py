"""The watchdog: when nothing moves, it says what everybody waits for.

A separate thread, because the scheduler thread is the one that is stuck. It only reads, and it asks
events whether they are done (`query`), it never waits for the device.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

#: A stall is noticed within this share of the timeout.
_CHECKS_PER_TIMEOUT = 4
#: The watchdog wakes no more often than this, however short the timeout.
_SHORTEST_CHECK_S = 0.1
_LISTED_REQUESTS = 8
_LISTED_FRAMES = 40


class StallDetector:
    """Writes one report for each stall.

    Args:
        timeout_s: seconds without progress while there is work; 0 turns the detector off.
        progress: a value that changes with every iteration of the loop.
        busy: whether there is anything to do; an idle server does not stall.
        describe: lines that say what is in flight.
        on_stall: called once per stall, after the report.
        thread_id: the scheduler thread, whose Python stack the report shows.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        progress: Callable[[], Any],
        busy: Callable[[], bool],
        describe: Callable[[], list[str]],
        on_stall: Callable[[], None],
        thread_id: int,
    ) -> None:
        self.timeout_s = timeout_s
        self.progress = progress
        self.busy = busy
        self.describe = describe
        self.on_stall = on_stall
        self.thread_id = thread_id
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.timeout_s > 0:
            self._thread = threading.Thread(target=self._watch, name="zos-stall", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        interval = max(self.timeout_s / _CHECKS_PER_TIMEOUT, _SHORTEST_CHECK_S)
        seen, unchanged, reported = object(), 0, False
        while not self._stop.wait(interval):
            now = self.progress()
            if now != seen or not self.busy():
                seen, unchanged, reported = now, 0, False
                continue
            unchanged += 1
            if unchanged >= _CHECKS_PER_TIMEOUT and not reported:
                reported = True
                self._report(unchanged * interval)

    def _report(self, seconds: float) -> None:
        try:
            frame = sys._current_frames().get(self.thread_id)
            stack = traceback.format_stack(frame) if frame is not None else ["(thread ended)\n"]
            logger.error(
                "zos-sglang: no progress for %.1f s (ZOS_STALL_TIMEOUT_S=%g). In flight:\n%s\n"
                "Scheduler thread:\n%s",
                seconds,
                self.timeout_s,
                "\n".join(f"  {line}" for line in self.describe()),
                "".join(stack[-_LISTED_FRAMES:]),
            )
        except Exception:
            logger.exception("zos-sglang: the stall report itself failed")
        self.on_stall()


def describe_batch(batch: Any) -> str:
    """One line about a batch: mode, size, first request ids."""
    rids = [str(getattr(req, "rid", "?")) for req in batch.reqs]
    more = "" if len(rids) <= _LISTED_REQUESTS else f" and {len(rids) - _LISTED_REQUESTS} more"
    mode = getattr(batch.forward_mode, "name", str(batch.forward_mode))
    return f"{mode}, {len(rids)} requests: {', '.join(rids[:_LISTED_REQUESTS])}{more}"


def describe_event(event: Any) -> str:
    """Whether an event has fired, without waiting for it."""
    if event is None:
        return "no event"
    return "done" if event.query() else "pending"
