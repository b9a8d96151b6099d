"""What surrounds a capture of CUDA graphs (the captures themselves: tests/gpu)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from zos_sglang.resident.capture import no_collection


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
