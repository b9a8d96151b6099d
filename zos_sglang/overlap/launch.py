"""One launch: waits, inputs, isolation, forward, relay, readback."""

from __future__ import annotations

from time import perf_counter_ns as now
from typing import Any

from zos_sglang.overlap.account import Account
from zos_sglang.overlap.isolation import PinRing, isolate
from zos_sglang.overlap.protocols import Batch, Device, SchedulerPort
from zos_sglang.overlap.row_ledger import RowLedgerError
from zos_sglang.overlap.streams import Streams
from zos_sglang.overlap.timed_event import time_wait
from zos_sglang.overlap.watch import OFF, READING_NS, SAMPLED, Watch


class Launcher:
    """Owns the order of one launch. State: the pins, and whether our launch is still trusted.

    After a fault of ours every later launch is upstream's. The one that failed too, if its forward was not
    entered; a forward that ran is not repeated, and what is left to do for it is done upstream's way. A
    forward that fails is the model's own error: as in stock, the process reports it and ends.

    Args:
        device: the forward's side.
        port: gives the way back to upstream's launch.
        streams: the waits.
        pins: references of the last launches.
        account: counts.
        own: False where only upstream's launch covers the configuration.
    """

    def __init__(
        self,
        device: Device,
        port: SchedulerPort,
        streams: Streams,
        pins: PinRing,
        account: Account,
        *,
        own: bool = True,
    ) -> None:
        self.device = device
        self.port = port
        self.streams = streams
        self.pins = pins
        self.account = account
        self.own = own
        #: Told of every step.
        self.watch: Watch = OFF
        #: Whether the last launch is, or may be, sampled later.
        self.delayed = False
        self._forward_entered = False

    def launch(self, batch: Batch) -> Any:
        """Queue one batch on the device; returns its result, whose tokens the host has not seen.

        Raises:
            RowLedgerError: debug mode found an input token that is not the reader's.
        """
        self.delayed = True
        if not self.own:
            self.account.passed("upstream-launch")
            return self.port.launch_upstream(batch)
        self._forward_entered = False
        try:
            return self._launch(batch)
        except RowLedgerError:
            raise  # debug mode found a wrong input; upstream's launch would run on it
        except Exception:
            if self._forward_entered:
                raise
            self._fell_back("launch")
            self.device.undo_prepare(batch)
            return self.port.launch_upstream(batch)

    def _launch(self, batch: Batch) -> Any:
        device = self.device
        device.prepare(batch)
        with device.forward_context():
            self.streams.forward_waits_for_schedule()
            # Outside the isolation: putting fields back must not bring consumed staging back.
            device.resolve_inputs(batch)
            with isolate(batch, self.pins):
                # From here on the step has effects on the device and cannot be repeated.
                self._forward_entered = True
                rows = batch.req_pool_indices
                result = device.forward(batch, rows)
                if device.delayed_sample(result) is None:
                    self.delayed = False
                    self._hand_on(batch, rows, result)
                else:
                    device.hold_sample(rows, result)
        device.finish(batch, rows, result)
        return result

    def sample_delayed(self, batch: Batch, result: Any) -> None:
        """Sample a launch whose mask needed the result before it; no-op if it is sampled already."""
        sample = self.device.delayed_sample(result)
        if sample is None:
            return
        self.account.passed("delayed-sampling")
        self.watch.depending()
        with self.device.forward_context():
            # The mask was filled on the schedule stream after the result before was processed.
            self.streams.forward_waits_for_schedule()
            sample()
            self._hand_on(batch, result.future_indices, result)
        self.device.release_sample(result)
        self.watch.depended()
        if self.watch.stamps is not None:
            time_wait(result, self)  # an asynchronous copy brings an event of its own

    def _hand_on(self, batch: Batch, rows: Any, result: Any) -> None:
        """The sample to the next step and to the host; on the forward stream."""
        device = self.device
        try:
            device.relay(batch, rows, result)
        except Exception:
            self._fell_back("relay")
            device.relay_upstream(batch, rows, result)
        watch = self.watch
        stamps = watch.stamps
        begun = 0
        if stamps is not None:
            if stamps[SAMPLED]:
                watch.reading_back()
            begun = now()
        try:
            self.streams.copy_waits_for_forward()
            with device.copy_context():
                device.readback(batch, result)
        except Exception:
            self._fell_back("readback")
            # Slower, but it takes nothing that may have failed: upstream's call, right behind the forward.
            self.streams.forward_waits_for_copy()
            device.readback_here(batch, result)
        if stamps is not None:
            stamps[READING_NS] += now() - begun
            if stamps[SAMPLED]:
                watch.read_back()

    def _fell_back(self, step: str) -> None:
        self.own = False
        self.account.fell_back(step, "upstream's launch takes over")
