"""Confidential computing: results come home through upstream's own worker thread.

There, issuing a copy from the device blocks the thread that issues it. `AsyncD2HCopyWorker` is upstream's
own, on CPU streams; a gate in the copies stands for the time that they take.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import scheduler as upstream
from sglang.srt.managers.async_d2h_copy_worker import AsyncD2HCopyWorker, HostCopyDone
from sglang.srt.utils import common

from tests.unit.test_port import batch, device, scheduler
from zos_sglang.resident.readback import Readback
from zos_sglang.settings import Settings
from zos_sglang.upstream.runtime import Runtime


class Stream(torch.cpu.Stream):
    """A CPU stream that can be waited for, as those of accelerators can."""

    def synchronize(self) -> None:
        """Everything on a CPU stream is done at once."""


DEVICE = SimpleNamespace(
    Stream=Stream,
    Event=torch.cpu.Event,
    stream=lambda stream: nullcontext(),
    current_device=lambda: 0,
    set_device=lambda index: None,
)


@pytest.fixture
def worker():
    made = AsyncD2HCopyWorker(DEVICE)
    yield made
    made.shutdown()
    assert not made._thread.is_alive()


class Held:
    """A copy that takes until `gate` opens; `waiting` is set once it has begun."""

    def __init__(self, copy: Any = lambda: None) -> None:
        self.gate, self.waiting, self.copy = threading.Event(), threading.Event(), copy

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.waiting.set()
        assert self.gate.wait(20)
        self.copy()


def result_of(copy: Any) -> Any:
    return SimpleNamespace(copy_to_cpu=copy, copy_done="the launch's event")


def test_the_flag_that_upstream_reads_turns_the_path_on(monkeypatch):
    monkeypatch.setenv("SGLANG_FORCE_CONFIDENTIAL_COMPUTE", "1")
    common.is_confidential_compute.cache_clear()
    try:
        assert common.is_confidential_compute()
    finally:
        monkeypatch.undo()
        common.is_confidential_compute.cache_clear()


# ---------------------------------------------------------------- the ordinary launch


def port_of(worker):
    """The device's side of our launch, with this worker."""
    quiet = lambda name, answer=None: lambda *args, **kwargs: answer  # noqa: E731
    it = device(scheduler(quiet, enable_async_d2h_copy=True))
    it.scheduler.async_d2h_worker = worker
    return it


def test_a_launch_does_not_wait_for_its_copy_and_whoever_processes_it_does(worker):
    copied: list[int] = []
    held = Held(lambda: copied.append(1))
    result = result_of(held)
    port_of(worker).readback(batch(), result)
    assert held.waiting.wait(20) and copied == []
    assert isinstance(result.copy_done, HostCopyDone) and not result.copy_done.query()
    held.gate.set()
    result.copy_done.synchronize()
    assert copied == [1] and result.copy_done.query()


def test_a_copy_that_failed_ends_the_step_that_reads_it(worker):
    def fail(**_: Any) -> None:
        raise ValueError("the bounce buffer is gone")

    result = result_of(fail)
    port_of(worker).readback(batch(), result)
    with pytest.raises(RuntimeError, match="copy failed") as caught:
        result.copy_done.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)


# ---------------------------------------------------------------- the lane


def test_the_lane_does_not_wait_for_its_copy_either(worker):
    ring = torch.arange(12).view(3, 4)
    held = Held()
    home = Readback(ring, lambda: None, nullcontext, torch.cpu.Event, worker.submit)
    worker.submit(held)  # the copy before is still under way
    tokens, done = home.queue(3)
    assert not done.query()
    held.gate.set()
    done.synchronize()
    assert tokens.tolist() == [0, 1, 2]


def test_the_lanes_tokens_are_those_of_their_step_however_late_the_worker_is(worker):
    """Step N is read before step N + 2 is launched; the worker may be behind by both."""
    ring = torch.zeros(3, 2, dtype=torch.int64)
    home = Readback(ring, lambda: None, nullcontext, torch.cpu.Event, worker.submit)
    queued: list[tuple[torch.Tensor, Any]] = []
    for step in range(1, 40):
        ring[(step - 1) % 3] = torch.tensor([step, -step])
        queued.append(home.queue(2))
        if len(queued) == 2:
            tokens, done = queued.pop(0)
            done.synchronize()
            assert tokens.tolist() == [step - 1, 1 - step]


def test_the_lanes_host_side_is_pageable_there(worker, monkeypatch):
    ring: Any = SimpleNamespace(shape=(3, 2), is_cuda=True)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty_like", lambda ring, **options: asked.append(options))
    for offload in (worker.submit, None):
        Readback(ring, lambda: None, nullcontext, torch.cpu.Event, offload)
    assert [options["pin_memory"] for options in asked] == [False, True]


# ---------------------------------------------------------------- the two ends of a process


class Ending:
    """A scheduler process of upstream's, around a scheduler whose loop ends as told."""

    def __init__(self, monkeypatch: Any, loop: Any) -> None:
        self.worker = AsyncD2HCopyWorker(DEVICE)
        self.thread = self.worker._thread
        self.order: list[str] = []
        self.signals: list[int] = []
        self.scheduler = SimpleNamespace(
            async_d2h_worker=self.worker,
            gracefully_exit=False,
            result_queue=deque(),
            get_init_info=dict,
            metrics_reporter=SimpleNamespace(_shutdown_fpm=lambda: None),
            release_host_resources=lambda: self.order.append("released"),
            run_event_loop=lambda: loop(self),
            process_batch_result=lambda batch, result: result.copy_done.synchronize(),
            ipc_channels=SimpleNamespace(
                send_to_tokenizer=SimpleNamespace(socket=None),
                send_to_detokenizer=SimpleNamespace(socket=None),
            ),
        )
        nothing = lambda *args, **kwargs: None  # noqa: E731
        for name in ("load_plugins", "publish", "spawn_world_rank", "configure_scheduler_process"):
            monkeypatch.setattr(upstream, name, nothing)
        monkeypatch.setattr(upstream, "abort_distributed_environment", nothing)
        monkeypatch.setattr(upstream, "get_observability", lambda: SimpleNamespace(enable_trace=False))
        parent = SimpleNamespace(send_signal=self.signals.append)
        process = SimpleNamespace(Process=lambda: SimpleNamespace(parent=lambda: parent))
        monkeypatch.setattr(upstream, "psutil", process)
        monkeypatch.setattr(upstream, "Scheduler", lambda *_: self.scheduler)

    def run(self) -> None:
        pipe = SimpleNamespace(send=lambda info: None)
        upstream.run_scheduler_process(None, None, 0, 0, 0, 0, pipe)


def launched(ending: Ending, copy: Any) -> None:
    """Put one result under way whose copy the worker makes."""
    result = result_of(copy)
    port_of(ending.worker).readback(batch(), result)
    ending.scheduler.result_queue.append((batch(), result))


def test_on_a_graceful_exit_the_copies_under_way_are_drained_before_the_worker_stops(monkeypatch):
    def loop(ending: Ending) -> None:
        held = Held(lambda: ending.order.append("copied"))
        launched(ending, held)
        ending.scheduler.gracefully_exit = True
        threading.Timer(0.05, held.gate.set).start()
        runtime = Runtime()
        runtime.settings = Settings(mode="overlap", exit_timeout_s=10)
        runtime.scheduler = ending.scheduler
        process = ending.scheduler.process_batch_result
        runtime._launcher = SimpleNamespace(port=SimpleNamespace(process=process, transfers=lambda: 0))
        runtime.drain_for_exit()
        assert runtime.account.paths["drained"] == 1

    ending = Ending(monkeypatch, loop)
    ending.run()
    assert ending.order == ["copied", "released"] and ending.signals == []
    assert not ending.thread.is_alive() and ending.scheduler.async_d2h_worker is None


def test_on_an_exception_the_worker_stops_too_and_nothing_waits_for_the_device(monkeypatch):
    def loop(ending: Ending) -> None:
        launched(ending, lambda **_: ending.order.append("copied"))
        raise RuntimeError("the device is gone")

    ending = Ending(monkeypatch, loop)
    ending.run()
    assert len(ending.signals) == 1 and "released" not in ending.order
    assert not ending.thread.is_alive() and ending.scheduler.async_d2h_worker is None
