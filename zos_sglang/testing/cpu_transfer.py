"""What SGLang 0.5.23's prefill role takes from CUDA, from the CPU instead.

Two places name CUDA without asking for the device: the event behind an early send, and the pinned copy of
page indices whose wait the transfer thread does. Both are replaced in the tests' platform only.
"""

from __future__ import annotations

from typing import Any

import torch


class Event:
    """Everything before an event is done when it is recorded: the CPU runs in program order."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Cuda:
    Event = Event


class _Torch:
    """`torch` with the CPU's events under the name `cuda`."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def fit_prefill_to_cpu() -> None:
    """Let the prefill role of this process run without a CUDA driver. Once or more often."""
    from sglang.srt.disaggregation import prefill
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    prefill.torch = _Torch()
    MooncakeKVSender.supports_host_tensor_indices = False
