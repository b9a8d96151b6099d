"""What surrounds a capture of CUDA graphs (the captures themselves: tests/gpu)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from zos_sglang.resident.capture import Capture, no_collection


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Gives the collector back as it was, also where a test fails."""
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_off_inside_and_as_before_after(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled() is before
    with pytest.raises(RuntimeError, match="capture"), no_collection():
        assert not gc.isenabled()
        raise RuntimeError("capture failed")
    assert gc.isenabled() is before


def test_what_cannot_be_captured_runs_eagerly_and_is_counted_and_explained_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pools: list[object] = []
    cuda = SimpleNamespace(graph_pool_handle=lambda: pools.append(object()) or pools[-1], Stream=object)
    monkeypatch.setattr("zos_sglang.resident.capture.torch", SimpleNamespace(cuda=cuda))
    capture, ran = Capture(enabled=True), []

    def fails(_: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing")

    capture.graph_of = fails  # type: ignore[method-assign]
    work = [lambda size=size: ran.append(size) for size in range(3)]
    assert [capture(f"work of {size}", one) for size, one in enumerate(work)] == work
    assert (capture.graphs, capture.failures) == (0, 3)
    assert len(pools) == 4, "a pool that a capture died in is not used again"
    assert sum(bool(r.exc_info) for r in caplog.records) == 1
    assert all(f"work of {size} cannot be captured" in caplog.text for size in range(3))
    capture.graph_of = lambda _: SimpleNamespace(replay="replay")  # type: ignore[method-assign]
    assert capture("more", work[0]) == "replay" and capture.graphs == 1  # type: ignore[comparison-overlap]
