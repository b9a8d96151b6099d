"""Command line of scripts/bench_ranks.py: what the rank-consensus check (ZOS_CHECK_RANKS) costs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zos_sglang.overlap.guards import Reason
from zos_sglang.ranks.exchange import Exchange, Peer
from zos_sglang.ranks.log import DecisionLog
from zos_sglang.resident.account import LaneAccount
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.stats import spread

DESCRIPTION = """\
Measures the check by itself: two ranks in one process, a dict in place of the store.

  note          the scheduler thread, us a decision: the same batch again, and a batch of new requests
  exchange      the other thread, us a decision of one rank: encode, publish, fetch, compare
  per_second    decisions that one rank's exchange can take

--off and --on add what scripts/bench_zos.py measured on two ranks without the check and with it (its --out
folders; repeatable): CPU of the scheduler's thread a step by mode and batch, and the difference."""

#: Decisions of one repeat; rows of a block, as the server has them; repeats.
DECISIONS, BLOCK, REPEATS = 20_000, 8, 7
BATCHES = (1, 16, 256)


class _Board(dict[str, bytes]):
    """A store in memory."""

    def put(self, key: str, value: bytes) -> None:
        self[key] = value

    def remove(self, key: str) -> None:
        self.pop(key, None)


def main(argv: list[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        servers = _servers(args.off, args.on)
        runs = [_head(folder) for folder in (*args.off, *args.on)]
    except (OSError, ValueError, KeyError) as error:
        print(f"bench_ranks: error: {error}", file=sys.stderr)
        return 2
    found = {"alone": [alone(batch) for batch in BATCHES], "servers": servers, "runs": runs}
    result = {**provenance("bench_ranks"), **found}
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps(found, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_ranks.py", formatter_class=argparse.RawDescriptionHelpFormatter, description=DESCRIPTION
    )
    for name in ("off", "on"):
        parser.add_argument(f"--{name}", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there")
    return parser


def alone(rows: int) -> dict[str, Any]:
    """The check by itself with batches of `rows` requests; microseconds, spread over the repeats."""
    same, fresh = _batch(rows), [_batch(rows) for _ in range(200)]
    found = {
        "same": [_noting(lambda _: same, DECISIONS) for _ in range(REPEATS)],
        "new": [_noting(lambda i: fresh[i % len(fresh)], 2000) for _ in range(REPEATS)],
        "exchange": [_exchanging(same) for _ in range(REPEATS)],
    }
    return {
        "rows": rows,
        "note_us": {"same_batch": spread(found["same"]), "new_requests": spread(found["new"])},
        "exchange_us": spread(found["exchange"]),
        "per_second": round(1e6 / spread(found["exchange"])["median"]),
    }


def _batch(rows: int) -> Any:
    mode = SimpleNamespace(name="DECODE", is_extend=lambda: False)
    reqs = [SimpleNamespace(rid=f"{i:032x}") for i in range(rows)]
    return SimpleNamespace(reqs=reqs, forward_mode=mode, is_extend_in_batch=False, extend_num_tokens=None)


def _log() -> DecisionLog:
    log = DecisionLog(LaneAccount(), lambda: 1000, lambda result: result)
    log.loop = SimpleNamespace(beat=1)
    return log


def _noting(batch_of: Callable[[int], Any], decisions: int) -> float:
    log, tokens = _log(), bytes(128)
    begun = time.perf_counter()
    for i in range(decisions):
        log.launching(batch_of(i), "lane step", Reason.OVERLAPPED, 32)
        log.processed(tokens)
    return (time.perf_counter() - begun) / decisions * 1e6


def _exchanging(batch: Any) -> float:
    board, logs = _Board(), [_log(), _log()]
    ranks = [Exchange(board, r, [Peer(1 - r)], BLOCK, logs[r].take) for r in range(2)]
    spent = 0.0
    for _ in range(DECISIONS // 64):
        for log in logs:
            for _ in range(64):
                log.launching(batch, "lane step", Reason.OVERLAPPED, 32)
        begun = time.perf_counter()
        for rank in ranks:
            rank.turn(0.0)
        spent += time.perf_counter() - begun
    if ranks[1].agreed < DECISIONS // 64 * 64:
        raise RuntimeError("the measured exchange did not compare everything")
    return spent / (2 * (DECISIONS // 64) * 64) * 1e6


def _servers(off: list[Path], on: list[Path]) -> list[dict[str, Any]]:
    """One entry for each mode and batch of the runs without the check, compared where --on has it too."""
    without, checked = _cpu(off), _cpu(on)
    found = []
    for (mode, batch), values in without.items():
        mine = spread(values)
        stock = without.get(("stock", batch))
        entry: dict[str, Any] = {"mode": mode, "batch": batch, "cpu_us": {"off": mine}}
        if stock is not None:
            entry["over_stock"] = round(mine["median"] / spread(stock)["median"], 3)
        if (mode, batch) in checked:
            entry["cpu_us"]["on"] = spread(checked[mode, batch])
            entry["check_us"] = round(entry["cpu_us"]["on"]["median"] - mine["median"], 1)
        found.append(entry)
    return found


def _head(folder: Path) -> dict[str, Any]:
    """Where a run comes from."""
    data = json.loads((folder / "bench_zos.json").read_text())
    return {name: data.get(name) for name in ("commit", "date", "command", "machine")}


def _cpu(folders: list[Path]) -> dict[tuple[str, int], list[float]]:
    """Scheduler CPU a step, us, of every repeat of every run."""
    found: dict[tuple[str, int], list[float]] = {}
    for folder in folders:
        for point in json.loads((folder / "bench_zos.json").read_text())["points"]:
            for entry in point["repeats"]:
                for mode, wave in entry["waves"].items():
                    found.setdefault((mode, point["batch"]), []).append(wave["cpu_us"]["median"])
    return found
