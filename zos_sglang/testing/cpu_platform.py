"""A plain-CPU platform for SGLang: torch operators only, no sgl-kernel, no Triton, no AMX.

SGLang's own CPU engine needs kernels that are not on PyPI. As an out-of-tree platform the same
device runs every dense model through the native (pure torch) branches. It is for tests and the
demo on machines without a GPU, and is active only when `SGLANG_PLATFORM=zos_cpu` names it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from zos_sglang.testing import cpu_speculation

PLATFORM_NAME = "zos_cpu"
ATTENTION = "torch_native"


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`: the class to use, or None if not selected.

    SGLang activates every platform it finds when no variable names one; this one must not
    take over a machine just because its folder is on the path.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return f"{PlainCpuPlatform.__module__}.{PlainCpuPlatform.__qualname__}"


class PlainCpuPlatform(SRTPlatform, CpuDeviceMixin):
    """The CPU as an out-of-tree device; every capability stays at its "no" default."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_default_attention_backend(self) -> str:
        """Name of the attention backend when no flag chooses one."""
        return ATTENTION

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Replace SGLang's choice for the device `cpu`, whose kernels this platform is without."""
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """The algorithms whose kernels this platform has."""
        return algorithm in ("NGRAM", cpu_speculation.BARRIER)

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Where the drafts of a verify step are written."""
        return cpu_speculation.extend_slots

    def init_backend(self) -> None:
        """Put a faster decode behind the name `torch_native`, in each worker, and fill gaps of `torch.cpu`.

        Under its own name it would take branches meant for Triton: upstream recognises
        backends that need none by the literal name (last locations of paged rows, graphs off).
        """
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from zos_sglang.testing.cpu_dp_attention import allow_dp_attention

        allow_dp_attention()
        if not hasattr(torch.cpu.Stream, "synchronize"):
            # Upstream's readback worker waits for its stream; there is nothing to wait for here.
            torch.cpu.Stream.synchronize = lambda self: None
        cpu_speculation.replace_kernels()

        @register_attention_backend(ATTENTION)
        def create(runner: Any) -> Any:
            from zos_sglang.testing.cpu_attention import RowwiseAttention

            return RowwiseAttention(runner)

        if (
            "sglang.srt.disaggregation.prefill" in sys.modules
        ):  # a scheduler's process, whose role may need it
            from zos_sglang.testing.cpu_transfer import fit_prefill_to_cpu

            fit_prefill_to_cpu()
