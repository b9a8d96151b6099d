"""Small CUDA graphs of the lane's own device work: captured where possible, run eagerly where not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: Kernels are compiled and loaded by plain runs first: neither is possible while a stream captures.
WARM_UPS = 2


class Capture:
    """Turns device work into one graph launch.

    The graphs share one memory pool of their own, for what is temporary inside them; everything that has to
    outlive a replay belongs into tensors allocated before. Without `enabled` (no CUDA device, or switched
    off) work stays as it is.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        #: How many graphs were captured, and how many pieces of work stayed eager because that failed.
        self.graphs = 0
        self.failures = 0
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, what: str, work: Callable[[], None]) -> Callable[[], None]:
        """A callable with the same effect on the current stream as `work`; one graph launch if it can be.

        Runs `work` for warm-up and then captures it, which synchronises: not for the hot path.

        Args:
            what: names the work in the log line of a failure.
            work: fixed shapes and addresses, and nothing from the host that changes between calls.
        """
        if not self.enabled:
            return work
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
        for _ in range(WARM_UPS):
            work()
        try:
            graph = self.graph_of(work)
        except Exception:
            # What fails for one size mostly fails for all: one traceback is enough.
            logger.warning(
                "zos-sglang: %s cannot be captured and runs eagerly", what, exc_info=not self.failures
            )
            self.failures += 1
            # A pool that a capture died in is not used again.
            self._pool = torch.cuda.graph_pool_handle()
            return work
        self.graphs += 1
        replay: Callable[[], None] = graph.replay
        return replay

    def graph_of(self, work: Callable[[], None]) -> Any:
        """`work` as a CUDA graph. Raises whatever ends a capture."""
        graph = torch.cuda.CUDAGraph()
        # Captured while serving: other threads may use CUDA meanwhile.
        with (
            no_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's cyclic collector might free an older graph, and that ends a capture under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
