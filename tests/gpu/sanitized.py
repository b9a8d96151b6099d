"""Runs under compute-sanitizer: the lane's kernels on small inputs, or a kernel that is wrong on purpose.

    python -m tests.gpu.sanitized kernels | wrong-memcheck | wrong-racecheck [cuda]

Inputs are made, and references run, on the host, so that little besides our kernels is instrumented. Prints
how many of ours were launched. `zos_sglang.testing.races.sanitizer` starts it. With `cpu`, and
TRITON_INTERPRET=1, the kernels also run without a GPU.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.unit import lane_kernel_cases
from zos_sglang.resident import kernels

ROUNDS = 5
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda"
#: Cases that bind device tensors themselves; their references run on the device too.
ON_DEVICE = ("largest_of_parts", "argmax")


def counted(module: Any) -> list[str]:
    """Let every launcher of `module` note its calls."""
    launched: list[str] = []
    for name in [n for n in vars(module) if n.startswith("launch_")]:
        real = getattr(module, name)

        def launch(*arguments: Any, real: Any = real, name: str = name, **options: Any) -> None:
            launched.append(name)
            real(*arguments, **options)

        setattr(module, name, launch)
    return launched


def moved(value: Any, device: str) -> Any:
    if isinstance(value, kernels.StepBuffers):
        return kernels.StepBuffers(*(moved(v, device) for v in value))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def compare_across(
    launch: Callable[..., None], reference: Callable[..., None], arguments: tuple, **options: int
) -> None:
    """As `lane_kernel_cases.compare`, with the reference on the host."""
    mine, theirs = [moved(a, DEVICE) for a in arguments], [moved(a, "cpu") for a in arguments]
    launch(*mine, **options)
    reference(*theirs, **options)
    for got, wanted in zip(mine, theirs, strict=True):
        both = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
        for a, b in both:
            if isinstance(a, torch.Tensor):
                assert torch.equal(a.cpu(), b), f"{reference.__name__}: {a} is not {b}"


def run_kernels() -> None:
    from zos_sglang.resident import triton_kernels

    launched = counted(triton_kernels)
    on_device = lane_kernel_cases.compare
    for name, case in lane_kernel_cases.CASES.items():
        lane_kernel_cases.compare = on_device if name in ON_DEVICE else compare_across
        for number in range(ROUNDS):
            torch.manual_seed(number)
            case(random.Random(number), DEVICE if name in ON_DEVICE else "cpu")
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    missing = {n for n in vars(triton_kernels) if n.startswith("launch_")} - set(launched)
    assert not missing, f"never launched: {missing}"
    print(json.dumps({"launches": len(launched)}), flush=True)


OVERRUN = 'extern "C" __global__ void overrun(int* to, int n) { to[n + threadIdx.x] = 1; }'
CLASH = """
extern "C" __global__ void clash(int* to) {
    __shared__ int cell[64];
    cell[threadIdx.x] = threadIdx.x;
    to[threadIdx.x] = cell[(threadIdx.x + 32) % 64];  // no barrier between the two warps
}
"""


def run_wrong(tool: str) -> None:
    """A write behind the end of a tensor, or a read of shared memory that no barrier orders."""
    to = torch.zeros(64, dtype=torch.int32, device="cuda")
    if tool == "memcheck":
        kernel = torch.cuda._compile_kernel(OVERRUN, "overrun")
        kernel((1, 1, 1), (32, 1, 1), (to, 64))
    else:
        kernel = torch.cuda._compile_kernel(CLASH, "clash")
        kernel((1, 1, 1), (64, 1, 1), (to,))
    torch.cuda.synchronize()


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "kernels":
        run_kernels()
    else:
        run_wrong(what.removeprefix("wrong-"))
