"""What recording costs, measured where it is paid: blocks of steps with it and without it, in turns."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import thread_time_ns
from typing import Any

from zos_sglang.observe.recorder import Recorder
from zos_sglang.overlap.watch import Off, Watch


class Blind(Off):
    """Records nothing, but counts steps and notices what spoils a block."""

    __slots__ = ("of",)

    def __init__(self, of: Alternation) -> None:
        self.of = of

    def idle(self) -> None:
        self.of.spoil()

    def paused(self) -> None:
        self.of.spoil()

    def end(self) -> None:
        self.of.step()


class Alternation:
    """Swaps a recorder in and out every `block` steps, and compares the thread's CPU time.

    Blocks in which the batch changed, or which an idle server interrupted, do not count. A look at whether
    somebody records is taken in both kinds of blocks, and so is the count of steps: neither is part of the
    difference (together under half a microsecond). Nor is what is done for many steps at a time, which is
    done between two blocks and given apart.

    Args:
        recorder: the one to be measured; in its place when this begins.
        put: puts something in the recorder's place.
        batch: what must stay the same for a block to count: mode and number of rows.
        steps: how many steps to run for.
        forward_cpu: CPU time, ns, that the model's forward took so far on a device that computes in this
            thread; it is not the scheduler's.
        done: called at the end, with the recorder back in its place.
        block: steps a block: those from one line of SGLang's log to the next (`--decode-log-interval`), so
            that each block has one. With other sizes the lines, 0.5 ms each, fall into blocks of one kind
            and then of the other, and the median is of this rather than of recording.
    """

    def __init__(
        self,
        recorder: Recorder,
        put: Callable[[Watch], None],
        batch: Callable[[], Any],
        *,
        steps: int,
        forward_cpu: Callable[[], int] = lambda: 0,
        done: Callable[[], None] = lambda: None,
        block: int = 40,
        clock: Callable[[], int] = thread_time_ns,
    ) -> None:
        self.recorder, self.put, self.batch, self.done = recorder, put, batch, done
        self.block, self.clock = block, clock
        self.left = steps
        self.forward_cpu = forward_cpu
        self._blind = Blind(self)
        self._on = True
        self._pairs: list[tuple[float, float]] = []
        self._half: float | None = None
        self._flushed, self._recorded = recorder.flush_ns, recorder.launches
        recorder.after = self.step
        self._open()

    def _open(self) -> None:
        self._count, self._spoiled = 0, False
        self._batch = self.batch()
        self._forward_from = self.forward_cpu()
        self._from = self.clock()

    def spoil(self) -> None:
        """This block has seen something else than steps."""
        self._spoiled = True

    def step(self) -> None:
        """An iteration has ended."""
        if self._on and self.recorder.interrupted:
            self._spoiled = True
        self._count += 1
        if self._count >= self.block:
            self._close()

    def _close(self) -> None:
        cpu = self.clock() - self._from - (self.forward_cpu() - self._forward_from)
        good = not self._spoiled and self.batch() == self._batch
        self._take(cpu / self._count / 1000 if good else None)
        self.left -= self._count
        if self.left <= 0:
            self.stop()
            return
        self._on = not self._on
        if self._on:
            self.recorder.restart()
        self.put(self.recorder if self._on else self._blind)
        if not self._on and self.recorder.room < self.block:
            self.recorder.settle_now()
        self._open()

    def _take(self, microseconds: float | None) -> None:
        if self._on:
            self._half = microseconds
        elif self._half is not None and microseconds is not None:
            self._pairs.append((self._half, microseconds))

    def stop(self) -> None:
        """Put the recorder back for good."""
        self.left = 0
        self.recorder.after = None
        if not self._on:
            self._on = True
            self.recorder.restart()
            self.put(self.recorder)
        self.done()

    def report(self) -> dict[str, Any]:
        """Microseconds of the scheduler thread's CPU a step, without the model's forward; medians of blocks.

        `cost_us` is the median difference of neighbours, `share` its part of a step without recording,
        `flush_us` what handing records on (once a second, in few blocks) comes to a step.
        """
        recorded = self.recorder.launches - self._recorded
        flush = (self.recorder.flush_ns - self._flushed) / recorded / 1000 if recorded else 0.0
        found: dict[str, Any] = {"blocks": len(self._pairs), "running": self.left > 0}
        if not self._pairs:
            return {**found, "on_us": None, "off_us": None, "cost_us": None, "share": None, "flush_us": None}
        off = median(b for _, b in self._pairs)
        cost = median(a - b for a, b in self._pairs)
        return {
            **found,
            "on_us": round(median(a for a, _ in self._pairs), 3),
            "off_us": round(off, 3),
            "cost_us": round(cost, 3),
            "share": round(cost / off, 5) if off else None,
            "flush_us": round(flush, 3),
        }
