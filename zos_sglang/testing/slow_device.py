"""A virtual GPU for server tests: the plain CPU, as if its results came from an asynchronous device.

On a CPU a forward is finished when its call returns, so nothing overlaps and nothing is ever waited for. With
this plugin a forward keeps a virtual device busy for a given time, from the moment its call returns: one
stream, in order, as a GPU that replays a CUDA graph. Results are computed at once, but their events
(`torch.cpu.Event`, which is what the scheduler makes on a CPU) are done only when the device is. The host
therefore waits, or does not, exactly where it would wait for a GPU.

How long a step keeps the device (G), against what the scheduler's thread needs for it (C):

- The real forward (F) runs on the thread before the device starts, as host work that prepares a launch: C is
  F plus everything else, and all of it counts in S, the part of C between a result and the next launch.
  Tiny model, batch 16, idle machine: F is 1 ms, the rest 0.3 (lane) to 0.6 ms (stock), all the double or
  more on a busy one. So measure C where G is to stand in a proportion to it, then set G (`set_pace`).
- G > C: with overlap a step takes G and the scheduler is hidden; without, G + S.
- G = C is the edge; G < C: the scheduler sets the pace with overlap, and the device idles.
- An event before a forward on an idle device is done at once, as on a GPU. So event times of a step without
  overlap are F + G. Where that matters make F small against the rest, with fewer layers
  (`--json-model-override-args '{"num_hidden_layers": 1}'`) and a slower host: selecting a batch takes
  `host_us` longer (the lane selects nothing and stays as fast as it is), spent as in a driver's call that
  blocks, not on a core. That belongs to C and S all the same, and other processes cannot make it longer.

The host's reads of tensors that a real device would hold up (`.tolist()`, `.cpu()`) do not wait, save one:
where results have no event (the loop without overlap), processing them waits for the device.

Values come from the environment (`SLOW_DEVICE_US`, `SLOW_DEVICE_PREFILL_US`, `SLOW_DEVICE_HOST_US`,
`SLOW_DEVICE_HOLD`), and while the server runs from a JSON file named by `SLOW_DEVICE_FILE`, see `set_pace`.
`ENTRY` is the `entry_points.txt` of a distribution that lets SGLang find the plugin.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENTRY = "[sglang.srt.plugins]\nslow_device = zos_sglang.testing.slow_device:register\n"
PREFIX = "SLOW_DEVICE_"
FILE = PREFIX + "FILE"

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Pace:
    """What the device does; microseconds.

    `us` a decode step, `prefill_us` any other forward with rows. `hold`: results are shown in groups of so
    many (1 or 2), when the last of the group is done. `host_us`: by how much selecting a batch is slower.
    """

    us: float = 0.0
    prefill_us: float = 0.0
    host_us: float = 0.0
    hold: int = 1

    def __post_init__(self) -> None:
        if min(self.us, self.prefill_us, self.host_us) < 0 or self.hold not in (1, 2):
            raise ValueError(f"no pace of a device: {self}")


def from_environment(environ: Mapping[str, str]) -> Pace:
    """The pace of variables `SLOW_DEVICE_*`. Raises ValueError for one that is no number or out of range."""
    given: dict[str, Any] = {}
    for name, default in asdict(Pace()).items():
        if (text := environ.get(PREFIX + name.upper())) is not None:
            given[name] = type(default)(text)
    return Pace(**given)


def set_pace(file: Path, pace: Pace) -> None:
    """Change the pace of a running device; it takes effect with the next forward."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(pace)))
    os.replace(fresh, file)  # a reader sees the old pace or the new one, never half


class PaceFile:
    """The pace in a file, read again when the file has changed; `first` until there is a file."""

    def __init__(self, path: str | None, first: Pace) -> None:
        self.path = path
        self.pace = first
        self._seen: tuple[int, int] | None = None

    def read(self) -> Pace:
        """The pace now; costs one `stat`. Raises what a file that `set_pace` did not write deserves."""
        if self.path is None:
            return self.pace
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return self.pace
        if (seen := (status.st_ino, status.st_mtime_ns)) != self._seen:
            self._seen = seen
            self.pace = Pace(**json.loads(Path(self.path).read_text()))
        return self.pace


class VirtualDevice:
    """One stream, of which only the time is real.

    Args:
        now: clock, ns.
        sleep: sleeps so many seconds, or a little longer.
    """

    def __init__(
        self,
        now: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.now = now
        self.sleep = sleep
        #: When everything submitted so far is done, ns.
        self.busy_until = 0
        self.hold = 1
        self.forwards = 0
        self._last = 0
        self._held: list[VirtualEvent] = []

    def submit(self, nanoseconds: int) -> None:
        """A forward of so many nanoseconds."""
        self.busy_until = self.reach() + nanoseconds
        self._last = nanoseconds
        self.forwards += 1
        for event in self._held:
            event.shown = max(event.shown, self.busy_until)
        self._held.clear()

    def reach(self) -> int:
        """When an event recorded now is reached, ns."""
        return max(self.now(), self.busy_until)

    def show(self, event: VirtualEvent) -> None:
        """Decide when the host may see an event that was just recorded."""
        event.shown = event.reached
        if self.hold > 1 and self.forwards % self.hold and not event.timed:
            # Whatever comes next shows it; if nothing comes, the time that it would have taken.
            event.shown += self._last
            if event not in self._held:
                self._held.append(event)

    def wait_until(self, moment: int) -> None:
        """Sleep until then."""
        while (left := moment - self.now()) > 0:
            self.sleep(left / 1e9)

    def synchronize(self) -> None:
        self.wait_until(self.busy_until)


class VirtualEvent:
    """As CUDA's event: one that was never recorded counts as done, and recording it again moves it."""

    device: VirtualDevice = VirtualDevice()

    __slots__ = ("reached", "shown", "timed")

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.timed = enable_timing
        #: When the device gets there, when the host sees it (later if results are held); ns, 0: not recorded.
        self.reached = 0
        self.shown = 0

    def record(self, stream: Any = None) -> None:
        self.reached = self.device.reach()
        self.device.show(self)

    def query(self) -> bool:
        return self.device.now() >= self.shown

    def synchronize(self) -> None:
        self.device.wait_until(self.shown)

    def wait(self, stream: Any = None) -> None:
        """Nothing: there is one stream."""

    def elapsed_time(self, end: VirtualEvent) -> float:
        """Milliseconds from this event to `end`. Raises RuntimeError as CUDA does where there are none."""
        for event in (self, end):
            if not event.timed:
                raise RuntimeError("an event without enable_timing has no time")
            if not event.reached:
                raise RuntimeError("the event was not recorded")
            if not event.query():
                raise RuntimeError("the event is not done")
        return (end.reached - self.reached) / 1e6


class Hooks:
    """What the plugin does in a scheduler process.

    Args:
        device: the one of the events.
        paces: where the pace stands.
    """

    def __init__(self, device: VirtualDevice, paces: PaceFile) -> None:
        self.device = device
        self.paces = paces
        self._slack: int | None = None

    def after_forward(self, output: Any, runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
        """`ModelRunner.forward`, the one way to the model in every loop and in the eager lane."""
        self._sharpen()
        pace, mode = self.paces.read(), forward_batch.forward_mode
        self.device.hold = pace.hold
        if not mode.is_idle():
            microseconds = pace.us if mode.is_decode() else pace.prefill_us
            self.device.submit(int(microseconds * 1000))

    def before_processing(self, scheduler: Any, batch: Any, result: Any, *more: Any, **named: Any) -> None:
        """`Scheduler.process_batch_result`: a result without an event is read with calls that wait."""
        if result.copy_done is None and not batch.forward_mode.is_idle():
            self.device.synchronize()

    def after_selection(self, plan: Any, *_: Any, **__: Any) -> None:
        """`Scheduler.get_next_batch_to_run`: a host that takes longer."""
        if plan.batch_to_run is not None and (microseconds := self.paces.pace.host_us):
            self.device.wait_until(self.device.now() + int(microseconds * 1000))

    def _sharpen(self) -> None:
        """Let this thread's sleeps end on time: by default Linux may add 50 us, as much as a short copy."""
        if self._slack is None:
            prctl = getattr(ctypes.CDLL(None), "prctl", None)
            self._slack = -1 if prctl is None else prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def register() -> None:
    """Entry point of group `sglang.srt.plugins`; acts in processes that run a scheduler.

    Raises:
        SystemExit: a bad variable. SGLang would log another exception and go on as a plain CPU.
    """
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        pace = from_environment(os.environ)
    except ValueError as error:
        raise SystemExit(f"slow_device: {error}") from None
    hooks = Hooks(VirtualEvent.device, PaceFile(os.environ.get(FILE), pace))
    torch.cpu.Event = VirtualEvent
    torch.cpu.synchronize = lambda device=None: VirtualEvent.device.synchronize()
    HookRegistry.register(f"{_RUNNER}.forward", hooks.after_forward, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", hooks.after_selection, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", hooks.before_processing, HookType.BEFORE)
