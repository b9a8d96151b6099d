"""Random inputs for each lane kernel, and the comparison of its Triton launcher with its reference.

Every tensor that a kernel may write is compared whole, so a write outside its rows shows. Run as a program it
compares all kernels on the CPU, for which TRITON_INTERPRET=1 must be set before triton is imported.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable

import torch

from zos_sglang.resident import greedy, kernels

CONTEXT = 700
POOL = 40
PAGES = (1, 2, 16, 64)


def _int64(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _noise(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randint(1, 10_000, shape, dtype=torch.int64).to(dtype).to(device)


def _table(device: str) -> torch.Tensor:
    return _noise((POOL, CONTEXT), torch.int32, device)


def _rows(rng: random.Random, n: int, bucket: int, device: str) -> torch.Tensor:
    return _int64([*rng.sample(range(1, POOL), n), *[0] * (bucket - n)], device)


def _lengths(rng: random.Random, n: int, bucket: int, device: str, most: int = CONTEXT - 70) -> torch.Tensor:
    return _int64([*(rng.randint(1, most) for _ in range(n)), *[1] * (bucket - n)], device)


def _sizes(rng: random.Random) -> tuple[int, int]:
    bucket = rng.choice([1, 2, 4, 8, 16, 32])
    return rng.randint(0, bucket), bucket


def compare(
    launch: Callable[..., None], reference: Callable[..., None], arguments: tuple, **options: int
) -> None:
    """Run both on copies of the same arguments; all tensors must end up equal.

    Raises:
        AssertionError: one differs, named by its place.
    """

    def flat(values: tuple) -> list:
        return [leaf for value in values for leaf in (flat(value) if isinstance(value, tuple) else [value])]

    def copied(value: object) -> object:
        if isinstance(value, kernels.StepBuffers):
            return kernels.StepBuffers(*map(copied, value))
        return value.clone() if isinstance(value, torch.Tensor) else value

    mine, theirs = tuple(map(copied, arguments)), tuple(map(copied, arguments))
    launch(*mine, **options)
    reference(*theirs, **options)
    for place, (got, wanted) in enumerate(zip(flat(mine), flat(theirs), strict=True)):
        if isinstance(got, torch.Tensor):
            assert torch.equal(got, wanted), (
                f"argument {place} of {reference.__name__}: {got} is not {wanted}"
            )


def advance(rng: random.Random, device: str) -> None:
    from zos_sglang.resident.triton_kernels import launch_advance

    n, bucket = _sizes(rng)
    if rng.random() < 0.2:
        n, bucket = 33, 200  # two programs, and rows that share neither
    step = kernels.StepBuffers(
        _noise((bucket,), torch.int64, device),
        _noise((bucket,), torch.int64, device),
        _lengths(rng, n, bucket, device),
        _noise((bucket,), torch.int64, device),
        _rows(rng, n, bucket, device),
        _table(device),
    )
    arguments = (step, _noise((bucket + 5,), torch.int64, device), _int64([n], device))
    compare(launch_advance, kernels.advance_reference, arguments)


def emit(rng: random.Random, device: str) -> None:
    from zos_sglang.resident.triton_kernels import launch_emit

    capacity = rng.choice([1, 5, 64, 512, 1100])
    depth = rng.randint(1, 4)
    arguments = (
        _noise((rng.randint(1, capacity),), torch.int64, device),
        _noise((capacity,), torch.int64, device),
        _noise((depth, capacity), torch.int64, device),
        _int64([rng.randint(0, 2**40)], device),
    )
    live = _int64([rng.randint(0, arguments[0].shape[0])], device)
    compare(launch_emit, kernels.emit_reference, (*arguments, live))


def write_slots(rng: random.Random, device: str) -> None:
    from zos_sglang.resident.triton_kernels import launch_write_slots

    page = rng.choice(PAGES)
    n = rng.randint(1, POOL - 1)
    steps = rng.randint(1, page) if page > 1 else rng.randint(1, 60)
    # One entry more than needed in front, so that the slice's alignment varies too.
    count = n * steps if page == 1 else n
    slots = _noise((count + 1,), torch.int64, device)[rng.randint(0, 1) :]
    arguments = (_table(device), _rows(rng, n, n, device), _lengths(rng, n, n, device), slots, steps)
    compare(launch_write_slots, kernels.write_slots_reference, arguments, page_size=page)


def gather_slots(rng: random.Random, device: str) -> None:
    from zos_sglang.resident.triton_kernels import launch_gather_slots

    n, bucket = _sizes(rng)
    most = rng.choice([3, 200, CONTEXT - 1])
    arguments = (
        _lengths(rng, n, bucket, device, most),
        _rows(rng, n, bucket, device),
        _table(device),
        torch.zeros(bucket + 1, dtype=torch.int32, device=device),
        _noise((bucket * CONTEXT,), torch.int64, device),
    )
    compare(launch_gather_slots, kernels.gather_slots_reference, arguments)


def append_page(rng: random.Random, device: str) -> None:
    from zos_sglang.resident.triton_kernels import launch_append_page

    n, bucket = _sizes(rng)
    page = rng.choice(PAGES)
    arguments = (
        _lengths(rng, n, bucket, device),
        _noise((bucket,), torch.int64, device),
        _noise((bucket,), torch.int32, device),
        _noise((bucket + 2, CONTEXT // page + 1), torch.int32, device),
        _int64([n], device),
    )
    compare(launch_append_page, kernels.append_page_reference, arguments, page_size=page)


def _logits(rng: random.Random, rows: int, columns: int, device: str) -> torch.Tensor:
    """Random ones with many ties, both zeros, infinities and NaN."""
    drawn = torch.randint(-3, 4, (rows, columns)).float() / rng.choice([1, 3, 0.0001])
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    for _ in range(rng.randint(0, 6)):
        drawn[rng.randrange(rows), rng.randrange(columns)] = odd[rng.randrange(5)]
    if rng.random() < 0.2:
        drawn[rng.randrange(rows)] = float("-inf")
    return drawn.to(rng.choice([torch.float32, torch.bfloat16])).to(device)


def largest_of_parts(rng: random.Random, device: str) -> None:
    from zos_sglang.resident.triton_kernels import launch_largest_of_parts

    rows, columns = rng.randint(1, 5), rng.randint(1, 5000)
    logits = _logits(rng, rows, columns, device)
    arguments = (
        _noise((rows, rng.choice([1, 2, 8])), torch.int64, device),
        _int64([rng.randint(0, 2**40)], device),
    )

    # Bound, because a NaN among them would make them differ from themselves.
    def launch(*rest: torch.Tensor) -> None:
        launch_largest_of_parts(logits, *rest)

    def reference(*rest: torch.Tensor) -> None:
        greedy.largest_of_parts_reference(logits, *rest)

    compare(launch, reference, arguments)


def hand_on(rng: random.Random, device: str) -> None:
    from zos_sglang.resident.triton_kernels import launch_hand_on

    rows, capacity, depth = rng.randint(1, 40), rng.choice([40, 64]), rng.randint(1, 4)
    arguments = (
        torch.randint(-(2**62), 2**62, (rows, rng.choice([1, 8, 64]))).to(device),
        _noise((capacity,), torch.int64, device),
        _noise((depth, capacity), torch.int64, device),
        _int64([rng.randint(1, 2**40)], device),
        _int64([rng.randint(0, rows)], device),
    )
    compare(launch_hand_on, greedy.hand_on_reference, arguments)


def argmax(rng: random.Random, device: str) -> None:
    """Both kernels together are `torch.argmax`."""
    from zos_sglang.resident.triton_kernels import launch_hand_on, launch_largest_of_parts

    rows, columns = rng.randint(1, 5), rng.randint(1, 5000)
    logits, count = _logits(rng, rows, columns, device), rng.choice([1, 4, 64])
    parts, tokens = _int64([0] * rows * count, device).view(rows, count), _int64([0] * rows, device)
    ring, counter = _int64([0] * rows, device).view(1, rows), _int64([0], device)
    launch_largest_of_parts(logits, parts, counter)
    launch_hand_on(parts, tokens, ring, counter, _int64([rows], device))
    assert torch.equal(tokens, torch.argmax(logits, -1)), (tokens, torch.argmax(logits, -1))
    assert torch.equal(ring[0], tokens)


CASES: dict[str, Callable[[random.Random, str], None]] = {
    "advance": advance,
    "emit": emit,
    "write_slots": write_slots,
    "gather_slots": gather_slots,
    "append_page": append_page,
    "largest_of_parts": largest_of_parts,
    "hand_on": hand_on,
    "argmax": argmax,
}


def failures(device: str, rounds: int) -> dict[str, str]:
    """The first failure of each kernel, with the round that reproduces it."""
    found = {}
    for name, case in CASES.items():
        for number in range(rounds):
            torch.manual_seed(number)
            try:
                case(random.Random(number), device)
            except Exception as error:
                found[name] = f"round {number}: {type(error).__name__}: {error}"
                break
    return found


if __name__ == "__main__":
    json.dump(failures("cpu", int(sys.argv[1])), sys.stdout)
