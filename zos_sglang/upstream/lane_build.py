"""Puts the resident lane together over a live scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.streams import Streams
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eager import EagerExecutor
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.resident.executor import Executor
from zos_sglang.resident.graph_executor import GraphExecutor
from zos_sglang.resident.lane import Lane
from zos_sglang.resident.readback import Readback
from zos_sglang.settings import Settings
from zos_sglang.upstream.decode_coverage import FA3, TRITON, Uncovered, uncovered
from zos_sglang.upstream.decode_graph import DecodeGraphs
from zos_sglang.upstream.disagg_decode import DecodePort
from zos_sglang.upstream.lane_decode import DecodeLanePort
from zos_sglang.upstream.lane_eligibility import server_refusal
from zos_sglang.upstream.lane_grammar import GrammarMasks
from zos_sglang.upstream.lane_model import SglangModelStep
from zos_sglang.upstream.lane_port import SglangLane, SglangLanePort
from zos_sglang.upstream.lane_results import LaneResults
from zos_sglang.upstream.port import SglangDevice
from zos_sglang.upstream.releases import captured_decode_was_read, copies_elsewhere

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What the lane shares with the ordinary path; `port` is its host side."""

    scheduler: Any
    device: SglangDevice
    streams: Streams
    pins: PinRing
    port: Any = None


def build_lane(parts: Parts, settings: Settings, account: LaneAccount) -> tuple[Lane, LaneResults] | None:
    """The lane with its result processing, or None, logged, where no batch of this server may ride."""
    scheduler, device, streams = parts.scheduler, parts.device, parts.streams
    if found := server_refusal(scheduler):
        _say_closed(account, *found)
        return None
    before = _reserved()
    executor = _executor(parts, settings, partial(GrammarMasks, account=account))
    if isinstance(executor, GraphExecutor) and executor.capture.failures:
        account.fault("capture", executor.capture.failures)
    if isinstance(executor, Uncovered):
        _say_closed(account, *executor)
        return None
    lane_port = DecodeLanePort if isinstance(parts.port, DecodePort) else SglangLanePort
    port = lane_port(scheduler, device, streams, parts.pins, account)
    if isinstance(port, DecodeLanePort):
        port.role_port = parts.port
    port.graphs = executor.graphs
    readback = Readback(
        executor.ring,
        streams.copy_waits_for_forward,
        device.copy_context,
        device.new_event,
        scheduler.async_d2h_worker.submit if copies_elsewhere(scheduler) else None,
    )
    lane = SglangLane(port, executor, readback, account, window=settings.lane_window)
    lane.may_repeat = get_parallel().tp_size == 1
    results = LaneResults(
        scheduler,
        account,
        undisturbed=lane.undisturbed,
        extra_steps=lane.extra_steps,
        row_ended=lane.row_ended,
        release_waits=port.schedule_waits_for_forward,
        failed=lane.fail,
    )
    account.device_bytes = _reserved() - before
    account.pinned_bytes = readback.host.nbytes
    logger.info(
        "zos-sglang: resident lane ready: %s steps, window %d, ring %d; %.1f MiB more on the device",
        "CUDA-graph" if executor.graphs else "eager",
        settings.lane_window,
        settings.lane_ring,
        account.device_bytes / 2**20,
    )
    return lane, results


def _reserved() -> int:
    """Bytes of device memory that PyTorch holds, graphs' pools included."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def _say_closed(account: LaneAccount, reason: Refusal, words: str) -> None:
    account.refused[reason] += 1
    logger.warning("zos-sglang: the resident lane stays closed (%s): %s", reason.value, words)


def _executor(
    parts: Parts, settings: Settings, masks: Callable[[int, Any], GrammarMasks]
) -> Executor | Uncovered:
    """CUDA graphs where the server has them, else ordinary forwards.

    `masks(capacity, device)` makes what fills grammars' masks.
    """
    scheduler = parts.scheduler
    runner = scheduler.tp_worker.model_runner
    if type(runner.decode_cuda_graph_runner).__name__ == "DecodeCudaGraphRunner":
        if not captured_decode_was_read():
            return Uncovered(Refusal.RELEASE, "decode graphs of a release that the lane was not tried with")
        if why := uncovered(runner):
            return why
        graphs = GraphExecutor(
            DecodeGraphs(runner, metadata=settings.lane_metadata, masks=masks), depth=settings.lane_ring
        )
        with parts.device.forward_context():
            graphs.capture_all()
        return graphs
    backend = type(runner.attn_backend).__name__
    if torch.device(runner.device).type != "cpu" and backend not in (TRITON, FA3):
        return Uncovered(Refusal.ATTENTION_BACKEND, f"attention backend {backend}")
    capacity = scheduler.max_running_requests
    return EagerExecutor(
        SglangModelStep(runner, masks(capacity, runner.device)),
        scheduler.req_to_token_pool.req_to_token,
        depth=settings.lane_ring,
        capacity=capacity,
    )
