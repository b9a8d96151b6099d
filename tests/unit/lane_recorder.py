"""Port, executor and readback of the lane that write down what they are asked for."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from tests.unit.fakes import Fault
from zos_sglang.resident.rows import RowTable


class Recorder:
    """Port, executor and readback in one: writes down what it is asked for, and fails where it is told to."""

    graphs = False

    def __init__(self):
        self.log: list[str] = []
        self.fails: set[str] = set()
        self.refusal = self.executor_refusal = None
        self.arrivals: list[bool] = []
        self.room = 100
        self.rides_on = False
        self.skips_finishing = self.has_slots = True
        self.windows: list[SimpleNamespace] = []
        self.lengths: list[tuple[int, int]] = []
        self.wanted: list[int] = []
        self.steps = 0

    def say(self, what):
        self.log.append(what)
        if what in self.fails:
            raise Fault(what)

    def since(self, length):
        return self.log[length:]

    # port

    def receive(self):
        self.say("receive")
        return self.arrivals.pop(0) if self.arrivals else False

    def dispatch(self):
        self.say("dispatch")

    def port_refuses(self, batch):
        return self.refusal

    def table(self, batch, pending):
        waiting = pending.reqs if pending is not None else []
        constrained = [row for row, req in enumerate(batch.reqs) if req.grammar is not None]
        pending_tokens = [int(r in waiting) for r in batch.reqs]
        return RowTable(batch.reqs, pending_tokens, frozenset(), (), constrained=constrained)

    def count_launch(self, batch):
        self.say("count")

    def uncount_launch(self, batch):
        self.say("uncount")

    def selected_again(self):
        self.say("selected")

    @contextmanager
    def forward_context(self):
        self.log.append("[")
        yield
        self.log.append("]")

    def forward_waits_for_schedule(self):
        self.say("forward waits")

    def schedule_waits_for_forward(self):
        self.say("schedule waits")

    def resolve_inputs(self, batch):
        self.say("resolve")

    def relay(self, batch, tokens):
        self.say(f"relay {tokens}")

    def pin(self, batch, references):
        self.say(f"pin {references}")

    def reserve(self, batch, done, wanted):
        self.say("reserve")
        self.wanted.append(wanted)
        self.done = done
        if min(wanted, self.room) < 1:
            return None
        window = Window(min(wanted, self.room), self)
        self.windows.append(window)
        return window

    def set_allocated(self, table, launched, reserved):
        self.lengths.append((launched, reserved))
        self.say(f"lengths +{launched} +{reserved}")

    def write_back(self, batch, table, steps):
        self.say(f"write back {steps}")

    def on_device(self, rows):
        self.say(f"rows {rows}")
        return rows

    def has_room(self, batch, rows, done):
        self.say(f"room {rows} {done}")
        return self.has_slots

    def rest_rides(self):
        return self.rides_on

    def leave(self, batch, table, rows, steps):
        self.say(f"leave {rows} {steps}")
        batch.reqs = [batch.reqs[row] for row in rows]

    def result(self, table, step, tokens, arrived):
        return SimpleNamespace(table=table, step=step, tokens=tokens, arrived=arrived)

    def sampled(self, result, tokens, arrived):
        self.say(f"sampled {result.step}")
        result.tokens, result.arrived = tokens, arrived


class Executing:
    """The executor's and the readback's side of the recorder."""

    def __init__(self, recorder):
        self.of = recorder
        self.refusal = None

    def refuses(self, batch):
        return self.refusal

    def open(self, batch):
        self.of.say("open")

    def step(self):
        self.of.say("step")
        self.of.steps += 1

    def begin(self):
        self.of.say("begin")

    def finish(self):
        self.of.say("finish")
        self.of.steps += 1

    def refresh(self):
        self.of.say("refresh")

    def keeping(self, rows):
        self.of.say(f"keeping {rows}")
        return True

    def keep(self, batch, kept):
        self.of.say(f"keep {kept}")

    def held(self):
        return ["held"]

    def last_tokens(self):
        return f"tokens {self.of.steps}"

    def floor_us(self, replays):
        self.of.say(f"floor {replays}")
        return 12.5

    def close(self):
        self.of.say("close")
        return ["held"]

    def queue(self, rows):
        self.of.say(f"readback {rows}")
        return "home", "event"

    def fetch(self, tokens):
        self.of.say(f"fetch {tokens}")
        return "fetched"


class Window(SimpleNamespace):
    def __init__(self, steps, recorder):
        super().__init__(steps=steps, used=0, recorder=recorder)

    @property
    def left(self):
        return self.steps - self.used

    def give_back(self):
        self.recorder.say(f"give back {self.left}")
