"""Which prefills are launched as one CUDA graph, by SGLang's own runner."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner

from zos_sglang.upstream.prefill_graph import launched_as_graph


def server(runner):
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(**runner)))


CAPTURED = SimpleNamespace(capture_num_tokens=[4, 1024, 4096], max_num_tokens=4096)


@pytest.mark.parametrize(
    ("tokens", "graph"), [(1, True), (4096, True), (4097, False), (None, False), (0, False)]
)
def test_a_prefill_up_to_the_largest_captured_size_is_one(tokens, graph):
    quick = launched_as_graph(server({"prefill_cuda_graph_runner": CAPTURED}))
    assert quick(SimpleNamespace(extend_num_tokens=tokens)) is graph


@pytest.mark.parametrize(
    "runner", [{}, {"prefill_cuda_graph_runner": None}, {"prefill_cuda_graph_runner": SimpleNamespace()}]
)
def test_without_captured_prefills_none_is(runner):
    """No such runner in this release, prefill graphs disabled, or upstream's eager runner in its place."""
    assert not launched_as_graph(server(runner))(SimpleNamespace(extend_num_tokens=4))


def test_a_worker_without_a_model_runner_launches_kernel_by_kernel():
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace())
    assert not launched_as_graph(scheduler)(SimpleNamespace(extend_num_tokens=4))


def test_upstreams_runner_has_what_this_reads():
    source = inspect.getsource(prefill_cuda_graph_runner.PrefillCudaGraphRunner)
    assert "self.capture_num_tokens" in source and "self.max_num_tokens" in source
