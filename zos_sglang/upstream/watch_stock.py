"""Watches loops that are SGLang's own, through attributes that stand on the scheduler meanwhile.

Those loops call everything by `self.`, so an attribute of the object is called in place of the method, and
whatever another plugin made of the method is called by ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import perf_counter_ns as now
from typing import Any

from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.timed_event import time_wait
from zos_sglang.overlap.watch import (
    ASKS,
    FORWARD,
    FORWARD_NS,
    FORWARDED,
    LAUNCH,
    OFF,
    OUTSIDE,
    PROCESS,
    PROCESSED,
    READING_NS,
    SAMPLED,
    SELECT,
    Watch,
)
from zos_sglang.upstream.releases import READBACK, has_readback_call
from zos_sglang.upstream.roles import role_of

_ABSENT = object()


class Stand:
    """One attribute of an object, replaced for a while."""

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self.owner, self.name, self.replacement = owner, name, replacement
        self.before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, replacement)

    def remove(self) -> None:
        """Put back what stood there; leaves alone what somebody else has put there since."""
        if vars(self.owner).get(self.name, self.replacement) is not self.replacement:
            return
        if self.before is _ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            setattr(self.owner, self.name, self.before)


class StockWatch:
    """Stamps the steps of `event_loop_overlap`, or of `event_loop_normal` where `normal`.

    The end of an iteration is not called by a name of its own. It is taken to be the call that comes last:
    delayed sampling, in the loop without overlap the processing, and for embeddings the next selection.
    """

    def __init__(self, scheduler: Any, *, normal: bool = False) -> None:
        self.scheduler = scheduler
        self.normal = normal
        self.watch: Watch = OFF
        self._stands: list[Stand] = []
        self._ends_at_select = not normal and not scheduler.is_generation
        # No call of its own reads back there; for who times the device it then ends with what queued it.
        self._silent_readback = normal or (scheduler.is_generation and not has_readback_call(scheduler))
        self._held_back = self._nothing = False

    @property
    def installed(self) -> bool:
        return bool(self._stands)

    def install(self, watch: Watch) -> None:
        """From here on `watch` sees every step. Between two iterations, or while one takes in requests."""
        self.watch = watch
        wrappers: dict[str, Callable[[Any], Any]] = {
            role_of(self.scheduler).select: self._select,
            "run_batch": self._launch,
            "process_batch_result": self._process,
            "_record_scheduler_state_for_paused_engine": self._pause,
        }
        if not self.normal:
            if has_readback_call(self.scheduler):
                wrappers[READBACK] = self._read_back
            wrappers["launch_batch_sample_if_needed"] = self._sample
        for name, wrap in wrappers.items():
            original = getattr(self.scheduler, name)
            self._stands.append(Stand(self.scheduler, name, wrap(original)))
        watch.begin()

    def remove(self) -> None:
        """Leave nothing behind. Once or more often."""
        self.watch = OFF
        for stand in reversed(self._stands):
            stand.remove()
        self._stands.clear()

    # ------------------------------------------------------------ the wrappers

    def _select(self, select: Callable[..., Any]) -> Callable[..., Any]:
        def selecting(*args: Any, **kwargs: Any) -> Any:
            if self._ends_at_select:
                self._end()
            self._held_back = False
            stamps = self.watch.stamps
            if stamps is not None:
                stamps[SELECT] = now()
            plan = select(*args, **kwargs)
            self._nothing = plan.batch_to_run is None
            if self._nothing and self.normal:
                self._end()
            return plan

        return selecting

    def _launch(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launching(batch: Any, *args: Any, **kwargs: Any) -> Any:
            queue = () if self.normal else self.scheduler.result_queue
            depth, reason = len(queue), self._reason(batch, queue)
            watch = self.watch
            stamps = watch.stamps
            if stamps is None:
                return launch(batch, *args, **kwargs)
            if stamps[ASKS]:
                watch.launching()
            stamps[LAUNCH] = now()
            result = launch(batch, *args, **kwargs)
            silent = self._silent_readback and (self.normal or result.delay_sample_func is None)
            if silent and stamps[SAMPLED]:
                # No call of its own reads back there; for who times the device the forward ends here.
                watch.reading_back()
                watch.read_back()
            watch.launched(batch, result, OUTSIDE, reason, depth)
            time_wait(result, self)
            return result

        return launching

    def _reason(self, batch: Any, queue: Collection[Any]) -> Reason:
        if self.normal:
            return Reason.OVERLAP_OFF
        if not self._held_back:
            return Reason.OVERLAPPED if queue else Reason.NOTHING_PENDING
        # Upstream does not say why. It has two rules; the first one needs two prefills in a row.
        last = self.scheduler.last_batch
        if self.scheduler.require_mlp_sync:
            twice = batch.is_extend_in_batch and last is not None and last.is_extend_in_batch
        else:
            twice = batch.forward_mode.is_extend() and last is not None and last.forward_mode.is_extend()
        return Reason.CONSECUTIVE_PREFILL if twice else Reason.GRAMMAR_SYNC

    def _process(self, process: Callable[..., Any]) -> Callable[..., Any]:
        def processing(batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            stamps = self.watch.stamps
            if stamps is not None:
                if stamps[PROCESS]:
                    self.watch.again()
                stamps[PROCESS] = now()
            done = process(batch, result, *args, **kwargs)
            if stamps is not None:
                stamps[PROCESSED] = now()
            self._held_back = True
            if self.normal:
                self._end()
            return done

        return processing

    def _read_back(self, read_back: Callable[..., Any]) -> Callable[..., Any]:
        def reading_back(*args: Any, **kwargs: Any) -> Any:
            watch = self.watch
            stamps = watch.stamps
            if stamps is None:
                return read_back(*args, **kwargs)
            if stamps[SAMPLED]:
                watch.reading_back()
            begun = now()
            done = read_back(*args, **kwargs)
            stamps[READING_NS] += now() - begun
            if stamps[SAMPLED]:
                watch.read_back()
            return done

        return reading_back

    def _sample(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def sampling(result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            delayed = result is not None and result.delay_sample_func is not None
            if delayed:
                self.watch.depending()
            done = sample(result, batch, *args, **kwargs)
            if delayed:
                stamps = self.watch.stamps
                if self._silent_readback and stamps is not None and stamps[SAMPLED]:
                    self.watch.reading_back()
                    self.watch.read_back()
                self.watch.depended()
                time_wait(result, self)
            self._end()
            return done

        return sampling

    def _pause(self, note: Callable[..., Any]) -> Callable[..., Any]:
        def pausing(*args: Any, **kwargs: Any) -> Any:
            self.watch.paused()
            done = note(*args, **kwargs)
            self.watch.begin()
            return done

        return pausing

    def _end(self) -> None:
        if self._nothing:
            self.watch.idle()
            self._nothing = False
        self.watch.end()


class ForwardWatch:
    """In place of a callable that runs the model: says when.

    Args:
        owner, name: whose attribute it is.
        asynchronous: a call only queues the model: nobody needs to know how long it took.
    """

    def __init__(self, owner: Any, name: str, asynchronous: bool) -> None:
        self.watch: Watch = OFF
        over = self._before if asynchronous else self._around
        self._stand = Stand(owner, name, over(getattr(owner, name)))

    def _before(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            watch = self.watch
            stamps = watch.stamps
            if stamps is not None and not stamps[FORWARD]:
                if stamps[SAMPLED]:
                    watch.forwarding()
                stamps[FORWARD] = now()
            return forward(*args, **kwargs)

        return watched

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        # A function, since a call of an object costs more.
        def watched(*args: Any, **kwargs: Any) -> Any:
            watch = self.watch
            stamps = watch.stamps
            if stamps is None:
                return forward(*args, **kwargs)
            if stamps[SAMPLED]:
                watch.forwarding()
            begun = now()
            if not stamps[FORWARD]:
                stamps[FORWARD] = begun
            done = forward(*args, **kwargs)
            ended = stamps[FORWARDED] = now()
            stamps[FORWARD_NS] += ended - begun
            if stamps[SAMPLED]:
                watch.forwarded()
            return done

        return watched

    def remove(self) -> None:
        self.watch = OFF
        self._stand.remove()


class ForwardMeter:
    """In place of a callable that runs the model: adds up what of the thread's CPU it takes, ns.

    Args:
        owner, name: whose attribute it is.
        clock: thread CPU clock, ns.
    """

    def __init__(self, owner: Any, name: str, clock: Callable[[], int]) -> None:
        self.cpu = 0
        self._stand = Stand(owner, name, self._over(getattr(owner, name), clock))

    def _over(self, forward: Callable[..., Any], clock: Callable[[], int]) -> Callable[..., Any]:
        def metered(*args: Any, **kwargs: Any) -> Any:
            begun = clock()
            done = forward(*args, **kwargs)
            self.cpu += clock() - begun
            return done

        return metered

    def remove(self) -> None:
        self._stand.remove()
