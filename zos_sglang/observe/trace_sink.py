"""The trace of one scheduler process: takes new records, writes them, and ends in order."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zos_sglang.observe.last_word import LastWord
from zos_sglang.observe.trace_events import Events, opening
from zos_sglang.observe.trace_file import TraceFile
from zos_sglang.observe.trace_place import not_replaceable
from zos_sglang.settings import Settings

#: Steps a write. Short writes are torn less, long ones cost less a step.
STEPS = 16

logger = logging.getLogger(__name__)

#: How many traces of a name this process has made: one more each time that a server changes its role.
_made: Counter[Path] = Counter()


def make_trace(settings: Settings, rank: int | str, facts: Mapping[str, Any]) -> TraceSink | None:
    """The trace that `ZOS_TRACE` asks for; None without it, or if its file cannot be made (logged).

    Args:
        settings: `trace` and `trace_mb`.
        rank: of this scheduler: a tensor-parallel rank, or a label such as `dp1.tp0`. 0 and "" write the file
            itself, others one beside it. A further trace of the process has its number in the name as well.
        facts: JSON about this server, in the file and on the report: `asynchronous` (bool), and best `mode`
            and `versions`.
    """
    if settings.trace is None:
        return None
    first = file_of(settings.trace, rank)
    number = _made[first] + 1
    path = first if number == 1 else first.with_name(f"{first.stem}.{number}{first.suffix}")
    try:
        trace = TraceSink(path, settings.trace_mb * 1_000_000, facts, f"scheduler {rank or 0}")
    except OSError as error:
        logger.error("zos-sglang: no trace: cannot write %s: %s", path, error.strerror)
        return None
    _made[first] = number
    return trace


def file_of(trace: str, rank: int | str) -> Path:
    """The file of a rank: `FILE` of the first, `FILE` with the rank before its suffix of the others."""
    path = Path(trace)
    label = f"tp{rank}" if isinstance(rank, int) and rank else rank
    return path.with_name(f"{path.stem}.{label}{path.suffix}") if label else path


class TraceSink:
    """A callable that takes records of dtype `STEP`, in order, as they become complete.

    What it has been given is in the file when the call returns. A fault, of the disk or of ours, ends the
    trace with one line in the log; it never reaches the scheduler.

    Args:
        path: what is there is replaced if `not_replaceable` allows it.
        limit_bytes: the trace ends before its file grows beyond.
        facts: see `make_trace`.
        process: name for people.

    Raises OSError if the file cannot be made.
    """

    def __init__(self, path: Path, limit_bytes: int, facts: Mapping[str, Any], process: str) -> None:
        if why_not := not_replaceable(path):
            raise FileExistsError(errno.EEXIST, why_not, str(path))
        pid, origin, unix_ns = os.getpid(), time.perf_counter_ns(), time.time_ns()
        self._events = Events(pid, origin, bool(facts.get("asynchronous")))
        self._file: TraceFile | None = TraceFile(
            path, limit_bytes, opening(facts, pid, origin, unix_ns, process)
        )
        self._newest = 0
        self._busy = False
        self.faults = 0
        #: Called first when SIGTERM ends the process: whatever hands over the records still held back.
        self.before_end: Callable[[], None] | None = None
        self._last_word = LastWord(self._terminated)
        self._last_word.install()

    def __call__(self, records: np.ndarray) -> None:
        """Write records that are newer than those before; does nothing once the trace has ended."""
        # A signal's handler may come in the middle of a call.
        if self._busy or self._file is None:
            return
        self._busy = True
        try:
            self._take(self._file, records[records["step"] > self._newest])
        except OSError as error:
            self._failed(error.strerror)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
        finally:
            self._busy = False

    def _failed(self, why: object) -> None:
        assert self._file is not None
        self.faults += 1
        logger.error("zos-sglang: the trace %s ends: %s", self._file.path, why)
        self._let_go()

    def _take(self, file: TraceFile, records: np.ndarray) -> None:
        for begin in range(0, len(records), STEPS):
            some = records[begin : begin + STEPS]
            self._newest = int(some["step"][-1])
            if not file.append(self._events.of(some)):
                full = self._events.instant(
                    "trace full", time.perf_counter_ns(), "p", limit_bytes=file.limit_bytes
                )
                file.append([full], last=True)
                logger.warning(
                    "zos-sglang: the trace %s ends at its limit, ZOS_TRACE_MB=%d",
                    *(file.path, file.limit_bytes // 1_000_000),
                )
                self._let_go()
                return

    def close(self) -> None:
        """End the trace; once or more often."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.append([self._events.instant("trace ends", time.perf_counter_ns(), "p")], last=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
            self._last_word.remove()

    def _terminated(self) -> None:
        if self.before_end is not None:
            self.before_end()
        self.close()
