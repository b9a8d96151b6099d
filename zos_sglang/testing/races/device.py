"""A device whose streams are threads: what is queued runs later, in any order that the waits allow.

A schedule says how late. It names the streams that run at once, as far as their waits allow; the others run
only when somebody waits for them. So an adversary can make any one stream as early and any other as late as
a program permits, and the answer of a program that forgot a wait is wrong every time, not by luck. `RANDOM`
delays every operation by a seeded amount instead, with all threads running freely.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from types import TracebackType
from typing import Any, Generic, TypeVar

from zos_sglang.testing.races.detector import HOST, Clock, Detector, Op

RANDOM = "random"
STREAMS = ("schedule", "forward", "copy")
#: Delays before an operation under `RANDOM`, in seconds.
DELAYS = (0.0, 0.0, 0.0, 0.00002, 0.0002)
#: No program here takes so long: a wait that never ends is a fault of the simulation.
PATIENCE_S = 60.0

Work = Callable[[], None]
S = TypeVar("S")


class Stream:
    """Operations in order on a thread of its own."""

    def __init__(self, device: Device, name: str, handle: int) -> None:
        self.device, self.name, self.cuda_stream = device, name, handle
        self.queued = self.done = 0
        #: How far somebody wants it to get.
        self.wanted = 0
        self._eager = device.schedule_of_runs == RANDOM or name in device.schedule_of_runs.split("+")
        self._random = Random(f"{device.seed} {name}")
        self._queue: deque[tuple[Work | None, Stream | None, int, Op | None]] = deque()
        #: After each operation: what it comes after, itself included.
        self._clocks: list[Clock] = [{}]
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def enqueue(self, run: Work, label: str = "") -> None:
        self._push(run, None, 0, self.device.detector.launch(self.name, label))

    def wait_stream(self, other: Stream) -> None:
        self._wait(other, other.queued)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self._wait(event.stream, event.position)

    def query(self) -> bool:
        return self.done == self.queued

    def synchronize(self) -> None:
        self.run_until(self.queued)

    def run_until(self, position: int) -> None:
        """The host sleeps until so many operations have run."""
        self._want(position)
        self.device.until(lambda: self.done >= position)
        self.device.detector.join(HOST, self._clocks[position])

    def _wait(self, other: Stream, position: int) -> None:
        self.device.detector.join(self.name, other._clocks[position])
        self._push(None, other, position, None)

    def _push(self, run: Work | None, other: Stream | None, position: int, op: Op | None) -> None:
        device = self.device
        with device.changed:
            self._queue.append((run, other, position, op))
            self._clocks.append(device.detector.reached(self.name))
            self.queued += 1
            device.changed.notify_all()
        if self._eager:
            self._want(self.queued)
            if device.schedule_of_runs != RANDOM:
                device.until(lambda: self.done == self.queued)

    def _want(self, position: int) -> None:
        with self.device.changed:
            if position > self.wanted:
                self.wanted = position
                self.device.changed.notify_all()

    def _work(self) -> None:
        device = self.device
        while True:
            with device.changed:
                device.changed.wait_for(lambda: device.closed or (self._queue and self.done < self.wanted))
                if device.closed:
                    return
                run, other, position, op = self._queue.popleft()
            if other is not None:
                other._want(position)
                with device.changed:
                    device.changed.wait_for(lambda o=other, p=position: device.closed or o.done >= p)  # type: ignore[misc]
            if run is not None:
                self._run(run, op)
            # What only the operation kept alive is free before the operation counts as done.
            run = None
            with device.changed:
                self.done += 1
                device.changed.notify_all()

    def _run(self, run: Work, op: Op | None) -> None:
        device = self.device
        if device.schedule_of_runs == RANDOM and (pause := self._random.choice(DELAYS)):
            time.sleep(pause)
        device.running.op = op
        try:
            run()
        except BaseException as error:
            device.failure = device.failure or error
        finally:
            device.running.op = None


class Event:
    """As CUDA's: one that was never recorded counts as done; recording it again moves it."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.stream: Any = None
        self.position = 0

    def record(self, stream: Any = None) -> None:
        self.stream = stream or self.device.current
        self.position = self.stream.queued

    def query(self) -> bool:
        """Is it done? Whoever asks again and again lets time pass, so the device gets on."""
        if self.stream is None or self.stream.done >= self.position:
            return True
        self.stream.run_until(self.stream.done + 1)
        return False

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.position)


class Streaming(Generic[S]):
    """A device's current stream, as frameworks know it: the innermost that was entered."""

    def __init__(self, stream: S) -> None:
        self._current = [stream]

    @property
    def current(self) -> S:
        return self._current[-1]

    def set_stream(self, stream: S) -> None:
        self._current[-1] = stream

    @contextmanager
    def on(self, stream: S) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()


class Device(Streaming[Stream]):
    """Three streams, and who is on which.

    Args:
        schedule_of_runs: names of the streams that run at once, joined by `+`; or `RANDOM`.
        seed: of the delays.
    """

    def __init__(self, schedule_of_runs: str = RANDOM, seed: int = 0) -> None:
        self.schedule_of_runs, self.seed = schedule_of_runs, seed
        self.detector = Detector()
        self.changed = threading.Condition()
        self.running = threading.local()
        self.closed = False
        self.failure: BaseException | None = None
        self.streams = {name: Stream(self, name, i + 1) for i, name in enumerate(STREAMS)}
        self.schedule, self.forward, self.copy = self.streams.values()
        super().__init__(self.schedule)
        for stream in self.streams.values():
            stream.thread.start()

    def touch(self, buffer: Hashable, label: str, *, writes: bool) -> None:
        """Whoever calls, the host or an operation that runs, reads or writes a buffer."""
        self.touch_all((buffer,), label, writes=writes)

    def touch_all(self, buffers: Iterable[Hashable], label: str, *, writes: bool) -> None:
        op = getattr(self.running, "op", None)
        self.detector.access_all(buffers, HOST if op is None else op, writes=writes, label=label)

    def until(self, condition: Callable[[], bool]) -> None:
        """Sleep until the streams got that far. Raises what an operation raised."""
        with self.changed:
            if not self.changed.wait_for(lambda: condition() or self.failure is not None, PATIENCE_S):
                raise TimeoutError("the device hangs")
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def finish(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()

    def close(self) -> None:
        """End the threads; what is queued and nobody waits for never runs."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for stream in self.streams.values():
            stream.thread.join()

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
