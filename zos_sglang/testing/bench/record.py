"""Where a measurement comes from, how it is kept, and its table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zos_sglang.console import console

PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "sglang-kernel")
_ROOT = Path(__file__).resolve().parents[3]


def commit() -> str:
    """The commit of this checkout (`-dirty` if files changed), else `BENCH_COMMIT`, else `unknown`."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def provenance(kind: str, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Commit, versions, machine, command line and date, as the head of a result file."""
    import torch

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    machine: dict[str, Any] = {"cpu": cpu_model(), "cores": os.cpu_count(), "gpu": None}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        versions["cuda"] = str(torch.version.cuda)
    return {
        "kind": kind,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(_relative(sys.argv if argv is None else argv)),
        "versions": versions,
        "machine": machine,
    }


def _relative(argv: Sequence[str]) -> list[str]:
    """Arguments without the folder of this checkout: where it lies on one machine is nobody's business."""
    return [word.replace(f"{_ROOT}/", "") for word in argv]


def write_json(path: Path, data: Any) -> None:
    """Write `data` to `path` at once: a reader, or a kill, never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(_compact(data) + "\n")
    partial.replace(path)


def _compact(data: Any, indent: int = 0) -> str:
    """JSON with lists of plain values on one line, so that raw samples do not fill the file."""
    pad, inner = " " * indent, " " * (indent + 1)
    if isinstance(data, dict) and data:
        body = (f"{inner}{json.dumps(str(k))}: {_compact(v, indent + 1)}" for k, v in data.items())
        return "{\n" + ",\n".join(body) + f"\n{pad}}}"
    if isinstance(data, list) and any(isinstance(item, dict | list) for item in data):
        return "[\n" + ",\n".join(inner + _compact(item, indent + 1) for item in data) + f"\n{pad}]"
    return json.dumps(data)


def print_table(result: dict[str, Any]) -> None:
    """Batch by mode: scheduler CPU and step time with quartiles, ratios to the base, digests."""
    from rich.table import Table

    table = Table(title=f"{result['title']}: median (quartiles) over {result['settings']['repeats']} repeats")
    for name in (
        "batch",
        "mode",
        "CPU outside forward, µs",
        "step, µs",
        "CPU ratio",
        "step ratio",
        "answers",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right")
    ratios = {(entry["batch"], entry["mode"]): entry for entry in result["ratios"]}
    for cell in result["cells"]:
        entry = ratios.get((cell["batch"], cell["mode"]))
        table.add_row(
            str(cell["batch"]),
            cell["mode"],
            _span(cell["cpu_us"]),
            _span(cell["wall_us"]),
            _range(entry["cpu"]) if entry else "1",
            _range(entry["wall"]) if entry else "1",
            result["digests"][str(cell["batch"])]["verdict"],
        )
    console().print(table)


def _span(found: dict[str, float]) -> str:
    return f"{found['median']:.0f} ({found['q1']:.0f} to {found['q3']:.0f})"


def _range(found: dict[str, Any]) -> str:
    return f"{found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})"
