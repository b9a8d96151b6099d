"""Which lane a server gets: none, with the reason said once, or one over the right executor."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.lane_standins import named, plain_scheduler
from tests.unit.upstream_decode_case import BUCKETS, VOCABULARY, TritonAttnBackend, model_runner
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eager import EagerExecutor
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.resident.graph_executor import GraphExecutor
from zos_sglang.settings import Settings
from zos_sglang.upstream import lane_build
from zos_sglang.upstream.decode_metadata import TritonMetadata, UpstreamMetadata
from zos_sglang.upstream.lane_build import Parts, build_lane

pytestmark = pytest.mark.usefixtures("published")


class Server:
    """A scheduler over upstream's decode runner, and what its lane shares with the ordinary path."""

    def __init__(self, *, graphs: bool, **settings: Any) -> None:
        self.runner = model_runner()
        if not graphs:
            self.runner.decode_cuda_graph_runner = None
        self.scheduler = plain_scheduler(self.runner)
        self.inside: list[str] = []
        device: Any = SimpleNamespace(
            forward_context=self.forward_context, copy_context=None, new_event=object
        )
        streams: Any = SimpleNamespace(copy_waits_for_forward=None)
        self.parts = Parts(self.scheduler, device, streams, PinRing())
        self.settings = Settings(mode="resident", **settings)
        self.account = LaneAccount()

    @contextmanager
    def forward_context(self) -> Any:
        self.inside.append("enter")
        yield
        self.inside.append("leave")

    def build(self) -> Any:
        return build_lane(self.parts, self.settings, self.account)

    def refused(self) -> dict[str, int]:
        return self.account.report()["refused"]


def test_a_server_with_decode_graphs_gets_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = Server(graphs=True, lane_ring=5, lane_window=17, lane_metadata="upstream")
    lane, results = server.build()
    assert type(lane.executor) is GraphExecutor and lane.port.graphs
    assert lane.executor.ring.shape == (5, max(BUCKETS)) and lane.window_steps == 17
    assert set(lane.executor._buckets) == set(BUCKETS), "captured before the server serves"
    assert server.inside == ["enter", "leave"], "on the forward stream"
    assert server.refused() == {}
    assert results.scheduler is server.scheduler and results.account is lane.account is server.account
    assert results.extra_steps == lane.extra_steps and results.row_ended == lane.row_ended
    assert "resident lane ready: CUDA-graph steps, window 17, ring 5" in caplog.text


def test_a_server_without_them_gets_ordinary_forwards(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = Server(graphs=False, lane_ring=3)
    lane, _ = server.build()
    assert type(lane.executor) is EagerExecutor and not lane.port.graphs
    assert lane.executor.ring.shape == (3, server.scheduler.max_running_requests)
    assert lane.executor.req_to_token is server.scheduler.req_to_token_pool.req_to_token
    assert lane.readback.ring is lane.executor.ring
    assert server.inside == [] and "lane ready: eager steps" in caplog.text


@pytest.mark.parametrize(("setting", "kind"), [("upstream", UpstreamMetadata), ("own", TritonMetadata)])
def test_the_metadata_is_prepared_by_whom_the_setting_says(
    setting: str, kind: type, monkeypatch: Any
) -> None:
    monkeypatch.setattr(GraphExecutor, "capture_all", lambda self: None)
    lane, _ = Server(graphs=True, lane_metadata=setting).build()
    assert type(lane.executor._metadata) is kind


# ---------------------------------------------------------------- none


def only_line(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [r for r in caplog.records if r.name == lane_build.__name__]
    assert record.levelno == logging.WARNING
    return record.getMessage()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_server_that_no_batch_may_ride_on_says_why_once(
    graphs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = Server(graphs=graphs)
    server.scheduler.enable_lora = True
    assert server.build() is None
    assert server.refused() == {"lora-server": 1}
    assert only_line(caplog) == "zos-sglang: the resident lane stays closed (lora-server): LoRA"
    assert server.inside == [] and server.account.device_bytes == server.account.pinned_bytes == 0


def test_decode_graphs_that_are_not_covered_say_why_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = Server(graphs=True)
    server.runner.decode_cuda_graph_runner.captured_req_width = 4
    assert server.build() is None
    assert server.refused() == {"model": 1}
    assert only_line(caplog).endswith("stays closed (model): several tokens a row")
    assert server.inside == []


def test_another_kind_of_decode_graphs_runs_ordinary_forwards() -> None:
    server = Server(graphs=False)
    server.runner.decode_cuda_graph_runner = named("EagerRunner")
    lane, _ = server.build()
    assert type(lane.executor) is EagerExecutor


@pytest.mark.parametrize(
    ("device", "backend", "rides"),
    [
        ("cpu", "AnyBackend", True),
        ("cuda", "TritonAttnBackend", True),
        ("cuda:1", "FlashAttentionBackend", True),
        ("cuda", "FlashInferAttnBackend", False),
    ],
)
def test_ordinary_forwards_on_a_device_need_attention_that_we_know(
    device: str, backend: str, rides: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(graphs=False)
    server.runner.device = device
    server.runner.attn_backend = type(backend, (TritonAttnBackend,), {})()
    assert (server.build() is not None) is rides
    if not rides:
        assert server.refused() == {Refusal.ATTENTION_BACKEND.value: 1}
        assert only_line(caplog).endswith(f"attention backend {backend}")


# ---------------------------------------------------------------- memory


def test_the_pinned_memory_is_the_hosts_side_of_the_ring() -> None:
    server = Server(graphs=False, lane_ring=6)
    server.build()
    assert server.account.pinned_bytes == 6 * server.scheduler.max_running_requests * 8
    if not torch.cuda.is_available():
        assert server.account.device_bytes == 0


def test_the_device_memory_is_what_pytorch_holds_more_graphs_included(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    held = [10 * 2**20]
    monkeypatch.setattr(lane_build, "_reserved", lambda: held[0])
    capture_all = GraphExecutor.capture_all

    def capture(executor: GraphExecutor) -> None:
        capture_all(executor)
        held[0] += 3 * 2**19

    monkeypatch.setattr(GraphExecutor, "capture_all", capture)
    server = Server(graphs=True, lane_metadata="upstream")
    server.build()
    assert server.account.device_bytes == 3 * 2**19
    assert server.account.report()["device_bytes"] == 3 * 2**19
    assert "1.5 MiB more on the device" in caplog.text


def test_the_reading_is_pytorchs_where_there_is_a_device(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 4096)
    for available, reading in ((True, 4096), (False, 0)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda there=available: there)
            assert lane_build._reserved() == reading


def test_the_lanes_logits_are_upstreams_own_buffer() -> None:
    server = Server(graphs=True, lane_metadata="upstream")
    lane, _ = server.build()
    logits = lane.executor._decode.logits(4)
    assert logits.shape == (4, VOCABULARY)
    buffers = server.runner.decode_cuda_graph_runner.buffers
    assert logits.data_ptr() == buffers.next_token_logits_buffer.data_ptr()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_tokens_come_home_through_upstreams_worker_where_it_has_one(elsewhere: bool) -> None:
    """Confidential computing: a copy that the scheduler's thread issued would hold it up."""
    server = Server(graphs=False)
    server.scheduler.enable_async_d2h_copy = elsewhere
    server.scheduler.async_d2h_worker = SimpleNamespace(submit="the worker") if elsewhere else None
    lane, _ = server.build()
    assert lane.readback.offload == ("the worker" if elsewhere else None)


def test_a_release_without_that_worker_has_a_lane_too() -> None:
    """0.5.22 knows neither name."""
    server = Server(graphs=False)
    vars(server.scheduler).pop("enable_async_d2h_copy", None)
    vars(server.scheduler).pop("async_d2h_worker", None)
    assert not hasattr(server.scheduler, "enable_async_d2h_copy")
    lane, _ = server.build()
    assert lane.readback.offload is None
