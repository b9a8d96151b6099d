"""Step times of each mode from a server's own log: what remains of a run that ended before its report.

SGLang logs a decode line every 40 steps with the tokens per second since the line before; the plugin logs
every switch. A line counts if no switch, no prefill and no change of batch size lies between it and the line
before, so that all its steps ran in one mode.

    python -m zos_sglang.testing.bench.logtime SERVER.log... --out FILE.json
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.stats import spread

_DECODE = re.compile(r"Decode batch, #running-req: (\d+), .*gen throughput \(token/s\): ([\d.]+)")
_SWITCH = re.compile(r"zos-sglang: mode \S+ -> (\S+)")


def step_times(lines: Iterable[str], mode: str | None = None) -> dict[tuple[int, str], list[float]]:
    """Microseconds per decode step, one value per counted log line, by batch size and mode.

    `mode` is the one in effect at the first line; where it is not known, lines before the first switch do not
    count.
    """
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    before = None
    for line in lines:
        if switch := _SWITCH.search(line):
            mode, before = switch[1], None
        elif "Prefill batch" in line:
            before = None
        elif decode := _DECODE.search(line):
            batch, rate = int(decode[1]), float(decode[2])
            if mode is not None and batch == before:
                times[batch, mode].append(round(batch / rate * 1e6, 1))
            before = batch
    return dict(times)


def summary(times: dict[tuple[int, str], list[float]]) -> list[dict[str, Any]]:
    """One row per batch size and mode, with the ratio of its median to stock's."""
    rows = []
    for (batch, mode), values in sorted(times.items()):
        stock = times.get((batch, "stock"))
        row: dict[str, Any] = {"batch": batch, "mode": mode, "step_us": spread(values), "raw_step_us": values}
        if stock and mode != "stock":
            row["median_over_stock"] = round(row["step_us"]["median"] / spread(stock)["median"], 4)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line; exit code 2 where a log has no counted line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    found = {log.name: summary(step_times(log.read_text(errors="replace").splitlines())) for log in args.logs}
    for name, rows in found.items():
        if not rows:
            print(f"logtime: error: {name} has no decode lines of one mode", file=sys.stderr)
            return 2
        for row in rows:
            ratio = row.get("median_over_stock", "")
            print(
                f"{name}: batch {row['batch']:>3} {row['mode']:<8}{row['step_us']['median']:>9.1f} us {ratio}"
            )
    write_json(args.out, {**provenance("logtime"), "logs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
