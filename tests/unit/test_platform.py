"""The plain-CPU platform and its attention."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from zos_sglang.testing.cpu_attention import RowwiseAttention
from zos_sglang.testing.cpu_platform import PlainCpuPlatform, activate
from zos_sglang.testing.server import cpu_env

LIST_PLATFORMS = (
    "from importlib.metadata import entry_points;"
    "print([(e.name, e.dist.name) for e in entry_points(group='sglang.srt.platforms')])"
)


def test_the_platform_stays_away_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert activate() is None


def test_the_named_platform_gives_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "zos_cpu")
    assert activate() == "zos_sglang.testing.cpu_platform.PlainCpuPlatform"


@pytest.mark.parametrize("found", [True, False])
def test_only_the_path_of_cpu_env_shows_the_platform_to_sglang(found: bool) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (cpu_env() if found else {})
    shown = subprocess.run(
        [sys.executable, "-c", LIST_PLATFORMS], env=env, capture_output=True, text=True, check=True
    )
    # A distribution of its own: SGLang skips the plugins of one whose platform is not selected.
    assert ("('zos_cpu', 'zos-cpu-platform')" in shown.stdout) is found
    assert "'zos-sglang'" not in shown.stdout


@pytest.mark.parametrize(
    ("chosen", "used"),
    [(None, "torch_native"), ("intel_amx", "torch_native"), ("flex_attention", "flex_attention")],
)
def test_attention_needs_no_kernel_package_unless_a_flag_says_so(chosen: str | None, used: str) -> None:
    args = SimpleNamespace(attention_backend=chosen)
    PlainCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == used


class Step:
    """One decode step of rows with these lengths, over a KV pool in scattered order."""

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, width: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.cache = torch.randn(2, 600, kv_heads, width, generator=generator)
        self.query = torch.randn(len(lengths), heads, width, generator=generator)
        self.table = torch.randperm(600, generator=generator)[: 8 * 64].view(8, 64).int()
        self.rows, self.lengths = torch.arange(len(lengths)), torch.tensor(lengths)

    def run(self, backend_class: type, only: int | None = None, window: int | None = None) -> Any:
        pick = slice(None) if only is None else slice(only, only + 1)
        rows, lengths, query = self.rows[pick], self.lengths[pick], self.query[pick]
        pool = SimpleNamespace(req_to_token=self.table)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=pool, token_to_kv_pool=None)
        backend = backend_class(runner)
        mode = SimpleNamespace(is_decode=lambda: True)
        backend.init_forward_metadata(
            SimpleNamespace(forward_mode=mode, req_pool_indices=rows, seq_lens=lengths)
        )
        return backend._run_sdpa_forward_decode(
            query,
            torch.empty_like(query),
            *self.cache,
            self.table,
            rows,
            lengths,
            None,
            scaling=0.25,
            enable_gqa=query.shape[1] != self.cache.shape[2],
            causal=False,
            is_cross_attn=False,
            sliding_window_size=window,
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_decode_attention_gives_what_upstreams_gives(heads: int, kv_heads: int) -> None:
    step = Step([1, 64, 17, 40], heads, kv_heads)
    torch.testing.assert_close(
        step.run(RowwiseAttention), step.run(TorchNativeAttnBackend), rtol=1e-5, atol=1e-6
    )


def test_a_sliding_window_is_left_to_upstream() -> None:
    step = Step([30, 64], 4, 2)
    windowed = step.run(RowwiseAttention, window=8)
    assert torch.equal(windowed, step.run(TorchNativeAttnBackend, window=8))
    assert not torch.equal(windowed, step.run(RowwiseAttention))


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    step = Step([1, 64, 17, 40, 33], 4, 2)
    together = step.run(RowwiseAttention)
    for row in range(5):
        assert torch.equal(step.run(RowwiseAttention, only=row)[0], together[row])
