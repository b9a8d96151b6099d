"""Command line of scripts/bench_wake.py: what Python costs after its thread has slept for a device.

A lane's thread sleeps for most of each step (`ZOS_WAIT=block`), and then an arrival has it launch a prefill,
which is milliseconds of Python. On a host whose cores slow down or lose their caches when they idle, that
piece takes longer than for a thread that polls (in the driver: `spin`, from Python: `poll`), or that was
never done with its work. Whether cores or caches make it so, `--rows` tells.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.command import measured, say
from zos_sglang.testing.bench.flags import json_flag, modes_of, positive
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.stats import spread
from zos_sglang.testing.server import cuda_available

WAYS = ("block", "spin", "poll", "busy")
#: The long piece is told in so many slices: a core that speeds up again shows in them.
SLICES = 8
#: A sleep of the device by which its clock is known.
_CYCLES = 10_000_000

DESCRIPTION = """\
Makes --steps short steps, each --work-us of Python and a wait of --wait-us, and then one long piece of
Python, --piece-us: as a thread in the resident lane that meets an arrival. Ways of waiting take turns:

  block  sleeps until a CUDA event (without a GPU: for a time)
  spin   has the driver poll for it (without a GPU: as poll)
  poll   asks for it from Python (without a GPU: looks at the clock)
  busy   has no wait: works on, as a thread that never gets done

The Python walks over --rows rows of objects. A few, as 50, fit into the first-level cache, so a piece that is
slow then was on a slow core; over many it may as well have met cold caches.

The table has the time of the long piece, its ratio to the last way's within each repeat, and its slices."""


def parser() -> argparse.ArgumentParser:
    """The flags; the defaults are a step of the lane on an H200's host."""
    found = argparse.ArgumentParser(
        prog="bench_wake.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog="Exit code: 0 measured, 2 could not run. It does not judge.",
    )
    add = found.add_argument
    add("--ways", type=modes_of(WAYS), default=WAYS, help=f"({','.join(WAYS)})")
    add("--work-us", type=positive, default=450, help="Python of a short step (450)")
    add("--wait-us", type=positive, default=1050, help="wait of a short step (1050)")
    add("--steps", type=positive, default=200, help="short steps before the long piece (200)")
    add("--piece-us", type=positive, default=8000, help="Python of the long piece (8000)")
    add("--rows", type=positive, default=20_000, help="rows of objects that the Python walks over (20000)")
    add("--repeats", type=positive, default=20, help="(20)")
    add("--out", type=Path, metavar="FILE", help="write the result there")
    json_flag(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    args = parser().parse_args(argv)
    result = measured("bench_wake", lambda: _measure(args))
    if result is None:
        return 2
    if args.out:
        write_json(args.out, result)
    if args.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


class Work:
    """Python that touches the memory of so many rows of objects, in pieces of a given length."""

    def __init__(self, rows: int) -> None:
        self._rows = [{"n": n, "list": [n] * 8, "pair": (n, n)} for n in range(rows)]
        self._at = 0
        # Not row by row, which hardware foresees, and without a common divisor: all are met.
        self._stride = 7 if rows % 7 else 1
        self._per_us = 1.0
        # The fastest: where the machine is busy, some in a row may take several times as long.
        self._per_us = 4000 / min(self.run_us(4000) for _ in range(50))

    def run_us(self, microseconds: float) -> float:
        """So much work, by how fast it went at the beginning; returns the microseconds it took."""
        rows, stride, begun = self._rows, self._stride, time.perf_counter()
        total = 0
        for _ in range(max(1, int(microseconds * self._per_us))):
            self._at = (self._at + stride) % len(rows)
            row = rows[self._at]
            total += row["n"] + row["list"][3] + len(row["pair"])  # type: ignore[index,arg-type]
            row["list"] = [total % 97] * 8
        return (time.perf_counter() - begun) * 1e6


def waits(microseconds: float) -> dict[str, Callable[[Work], Any]]:
    """How each way waits for a device that is busy for so long."""
    found: dict[str, Callable[[Work], Any]] = {"busy": lambda work: work.run_us(microseconds)}
    if not cuda_available():
        return found | {
            "block": lambda _: time.sleep(microseconds / 1e6),
            "spin": lambda _: _poll(microseconds),
            "poll": lambda _: _poll(microseconds),
        }
    import torch

    from zos_sglang.upstream.poll import PolledEvent

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first one loads the kernel
        begin.record()
        torch.cuda._sleep(_CYCLES)
        end.record()
        end.synchronize()
    cycles = int(microseconds * _CYCLES / (begin.elapsed_time(end) * 1000))

    def wait_for(event: Any) -> None:
        torch.cuda._sleep(cycles)
        event.record()
        event.synchronize()

    events = {"block": torch.cuda.Event(blocking=True), "spin": torch.cuda.Event(), "poll": PolledEvent()}
    for way, event in events.items():
        found[way] = lambda _, event=event: wait_for(event)  # type: ignore[misc]
    return found


def _poll(microseconds: float) -> None:
    end = time.perf_counter() + microseconds / 1e6
    while time.perf_counter() < end:
        pass


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    work, known = Work(args.rows), waits(args.wait_us)
    runs = []
    for repeat in range(args.repeats):
        for place in range(len(args.ways)):
            way = args.ways[(repeat + place) % len(args.ways)]
            runs.append({"way": way, "repeat": repeat, "slices_us": _run(args, work, known[way])})
        say(f"  repeat {repeat + 1} of {args.repeats}")
    settings = {name: getattr(args, name) for name in ("work_us", "wait_us", "steps", "piece_us", "rows")}
    return {
        **provenance("bench_wake"),
        "settings": settings,
        "runs": runs,
        "summary": summarise(runs, args.ways),
    }


def _run(args: argparse.Namespace, work: Work, wait: Callable[[Work], Any]) -> list[float]:
    for _ in range(args.steps):
        work.run_us(args.work_us)
        wait(work)
    return [round(work.run_us(args.piece_us / SLICES), 1) for _ in range(SLICES)]


def summarise(runs: Sequence[dict[str, Any]], ways: Sequence[str]) -> list[dict[str, Any]]:
    """One row a way: the long piece (us), over the last way in the same repeat, and medians of its slices."""
    whole = {(run["way"], run["repeat"]): sum(run["slices_us"]) for run in runs}
    rows = []
    for way in ways:
        mine = [run for run in runs if run["way"] == way]
        ratios = [whole[way, run["repeat"]] / whole[ways[-1], run["repeat"]] for run in mine]
        slices = [
            spread(column, 1)["median"] for column in zip(*(run["slices_us"] for run in mine), strict=True)
        ]
        pieces = [whole[way, run["repeat"]] for run in mine]
        rows.append({"way": way, "us": spread(pieces, 1), "over": spread(ratios), "slices_us": slices})
    return rows


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    from zos_sglang.console import console

    last = result["summary"][-1]["way"]
    table = Table("wait", "long piece us", f"over {last}", "slices us", title="after steps with this wait")
    for row in result["summary"]:
        us, over = row["us"], row["over"]
        table.add_row(
            row["way"],
            f"{us['median']:.0f} ({us['min']:.0f} to {us['max']:.0f})",
            f"{over['median']:.3f} ({over['q1']:.3f} to {over['q3']:.3f})",
            " ".join(f"{one:.0f}" for one in row["slices_us"]),
        )
    console().print(table)
