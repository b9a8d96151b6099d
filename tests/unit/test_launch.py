"""The order of one launch, and what happens when it fails."""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.unit.fake_batch import SpecAlgorithm
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.overlap.row_ledger import RowLedgerError
from zos_sglang.overlap.streams import Streams
from zos_sglang.upstream.port import SglangDevice


class Sampling:
    def copy_for_forward(self):
        return Sampling()


class Batch:
    def __init__(self):
        self.sampling_info = Sampling()
        self.spec_algorithm = SpecAlgorithm()
        self.req_pool_indices = "rows"


class Device:
    """Writes down what it is asked for; `fails` names the method that raises."""

    def __init__(self, log, delayed=False, fails=None, error=RuntimeError):
        self.log, self.delayed, self.fails, self.error = log, delayed, fails, error
        self.account = Account()

    def _did(self, name):
        self.log.append(name)
        if name == self.fails:
            raise self.error(f"{name} failed")

    def prepare(self, batch):
        self._did("prepare")

    def undo_prepare(self, batch):
        self._did("undo_prepare")

    def resolve_inputs(self, batch):
        self._did("resolve_inputs")

    def forward(self, batch, rows):
        assert rows == "rows"
        self._did("forward")
        sample = (lambda: self._did("sample")) if self.delayed else None
        return SimpleNamespace(sample=sample, future_indices=None)

    def delayed_sample(self, result):
        return result.sample

    def relay(self, batch, rows, result):
        assert rows == "rows"
        self._did("relay")

    def relay_upstream(self, batch, rows, result):
        assert rows == "rows"
        self._did("relay upstream")

    def readback(self, batch, result):
        self._did("readback")

    def readback_here(self, batch, result):
        self._did("readback here")

    def hold_sample(self, rows, result):
        result.future_indices = rows
        self._did("hold_sample")

    def release_sample(self, result):
        result.sample = None
        self._did("release_sample")

    def finish(self, batch, rows, result):
        self._did("finish")

    @contextmanager
    def _context(self, name):
        self.log.append(f"{name}[")
        yield
        self.log.append("]")

    def forward_context(self):
        return self._context("forward")

    def copy_context(self):
        return self._context("copy")


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log():
    return []


def launcher(log, own=True, **device):
    dev = Device(log, **device)
    streams = Streams(
        *(Stream(n, log) for n in ("schedule", "forward", "copy")), barrier_enabled=True, force_coarse=False
    )
    port = SimpleNamespace(launch_upstream=lambda batch: log.append("upstream") or "upstream result")
    return Launcher(dev, port, streams, PinRing(), dev.account, own=own)


READBACK = ["copy waits for forward", "copy[", "readback", "]"]
ENTRY = ["prepare", "forward[", "forward waits for schedule", "resolve_inputs", "forward"]


def test_a_plain_launch_waits_resolves_runs_relays_and_reads_back_in_this_order(log):
    it = launcher(log)
    it.launch(Batch())
    assert log == [*ENTRY, "relay", *READBACK, "]", "finish"]
    assert it.account.paths["delayed-sampling"] == it.account.paths["upstream-launch"] == 0


def test_a_delayed_launch_samples_relays_and_reads_back_later_and_releases_the_closure(log):
    it, batch = launcher(log, delayed=True), Batch()
    result = it.launch(batch)
    assert log == [*ENTRY, "hold_sample", "]", "finish"]
    log.clear()
    it.sample_delayed(batch, result)
    sampled = ["forward[", "forward waits for schedule", "sample", "relay", *READBACK, "]", "release_sample"]
    assert log == sampled
    assert result.sample is None and it.account.paths["delayed-sampling"] == 1


def test_a_launch_that_sampled_is_not_sampled_again(log):
    it, batch = launcher(log), Batch()
    result = it.launch(batch)
    log.clear()
    it.sample_delayed(batch, result)
    assert log == [] and it.account.paths["delayed-sampling"] == 0


@pytest.mark.parametrize("where", ["prepare", "resolve_inputs"])
def test_a_failure_before_the_forward_hands_this_and_every_later_launch_to_upstream(log, where, caplog):
    it = launcher(log, fails=where)
    assert it.launch(Batch()) == "upstream result"
    assert log[-2:] == ["undo_prepare", "upstream"]
    assert "forward" not in log
    log.clear()
    assert it.launch(Batch()) == "upstream result"
    assert log == ["upstream"]
    assert (it.account.paths["fallbacks"], it.account.paths["upstream-launch"]) == (1, 1)
    said = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == 1 and f"{where} failed" in said[0].exc_text


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(
    ("where", "instead"),
    [("relay", ["relay upstream"]), ("readback", ["forward waits for copy", "readback here"])],
)
def test_after_a_forward_that_ran_the_rest_is_done_upstreams_way(log, where, instead, delayed, caplog):
    it, batch = launcher(log, fails=where, delayed=delayed), Batch()
    result = it.launch(batch)
    it.sample_delayed(batch, result)
    at = log.index(where)
    assert log[at + 1 : at + 1 + len(instead)] == instead
    assert log.count("forward") == 1 and "undo_prepare" not in log
    assert result.sample is None, "sampled in the end"
    log.clear()
    assert it.launch(Batch()) == "upstream result", "and so is every later launch"
    assert it.account.faults == {where: 1} and it.account.paths["fallbacks"] == 1
    assert [r.levelno for r in caplog.records] == [logging.ERROR] and f"{where} failed" in caplog.text


@pytest.mark.parametrize("where", ["forward", "finish"])
def test_a_failure_from_the_forward_on_is_not_repeated(log, where):
    it, batch = launcher(log, fails=where), Batch()
    own = batch.sampling_info
    with pytest.raises(RuntimeError, match=f"{where} failed"):
        it.launch(batch)
    assert "upstream" not in log and it.own
    assert batch.sampling_info is own


def test_a_wrong_input_found_by_the_ledger_is_not_launched_by_upstream_either(log):
    it = launcher(log, fails="resolve_inputs", error=RowLedgerError)
    with pytest.raises(RowLedgerError):
        it.launch(Batch())
    assert "upstream" not in log and it.own


def test_a_launch_after_a_good_one_still_falls_back(log):
    """Whether the forward was entered is told for each launch by itself."""
    it = launcher(log)
    it.launch(Batch())
    it.device.fails = "resolve_inputs"
    assert it.launch(Batch()) == "upstream result"


def test_a_configuration_that_only_upstream_covers_never_reaches_the_device(log):
    it = launcher(log, own=False)
    it.launch(Batch())
    assert log == ["upstream"] and it.account.paths["upstream-launch"] == 1


def test_the_forward_runs_on_a_copy_of_the_sampling_parameters(log):
    it, batch, seen = launcher(log), Batch(), []
    run = it.device.forward
    it.device.forward = lambda b, rows: seen.append(b.sampling_info) or run(b, rows)
    own = batch.sampling_info
    it.launch(batch)
    assert seen[0] is not own and batch.sampling_info is own


class Logits:
    """Stands for the largest tensor of a step."""


class UpstreamLike(Device):
    """Delays its sampling as upstream's worker does: the closure holds the logits and the result."""

    delayed_sample = SglangDevice.delayed_sample
    release_sample = SglangDevice.release_sample

    def forward(self, batch, rows):
        logits = Logits()
        result = SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits), future_indices=None, tokens=None
        )

        def sample():
            result.tokens = type(logits)
            return result

        result.delay_sample_func = sample
        self.held = weakref.ref(logits), weakref.ref(sample)
        return result


def test_a_delayed_sampling_is_let_go_as_soon_as_it_is_queued(log):
    """Its result stays for one more step, in the queue: neither logits nor closure may stay with it."""
    it, batch = launcher(log), Batch()
    it.device = device = UpstreamLike(log)
    result = it.launch(batch)
    assert all(ref() is not None for ref in device.held)
    gc.disable()
    try:
        it.sample_delayed(batch, result)
        assert [ref() for ref in device.held] == [None, None]
    finally:
        gc.enable()
    assert result.tokens is Logits
