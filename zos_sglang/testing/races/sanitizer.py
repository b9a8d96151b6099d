"""Runs the lane's kernels under NVIDIA's compute-sanitizer and counts what it finds.

`tests/gpu/sanitized.py` is what runs under the tool: every kernel on small random inputs, and two kernels
that are wrong on purpose, which show that the tool sees errors here at all. Memcheck watches every access to
device memory (each tensor is an allocation of its own: PyTorch's cache is off), racecheck those to shared
memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.gpu.sanitized"
TOOLS = ("memcheck", "racecheck")
LIMIT_S = 90.0
#: `ERROR SUMMARY: 3 errors`, `RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)`.
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_LAUNCHES = re.compile(r'^\{"launches": (\d+)\}$', re.MULTILINE)


class NoSanitizer(RuntimeError):
    """compute-sanitizer is not there."""


@dataclass(frozen=True)
class Outcome:
    """One run. `errors` is None without a summary of the tool, `launches` if the program did not end."""

    tool: str
    program: str
    launches: int | None
    errors: int | None
    seconds: float
    timed_out: bool
    returncode: int

    @property
    def ok(self) -> bool:
        if self.timed_out or self.errors is None:
            return False
        if self.program.startswith("wrong"):
            return self.errors > 0
        return self.errors == 0 and self.returncode == 0 and bool(self.launches)


def find_sanitizer(places: Iterable[Path] | None = None) -> str:
    """The path of compute-sanitizer.

    Raises:
        NoSanitizer: none on the path or in a CUDA toolkit.
    """
    if places is None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        toolkits = [Path(home)] if home else []
        toolkits += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
        places = [t / sub for t in toolkits for sub in ("bin", "compute-sanitizer")]
        if found := shutil.which("compute-sanitizer"):
            return found
    for place in places:
        if os.access(candidate := place / "compute-sanitizer", os.X_OK):
            return str(candidate)
    raise NoSanitizer(
        "compute-sanitizer is neither on PATH nor in a CUDA toolkit: install the toolkit's package "
        "cuda-sanitizer, or set CUDA_HOME to a toolkit that has it"
    )


def run_under(tool: str, program: str, command: Sequence[str], limit_s: float = LIMIT_S) -> Outcome:
    """Run `command` and read the tool's summary; the whole process group ends at the limit."""
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "CUDA_MODULE_LOADING": "LAZY",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    begun, timed_out = time.monotonic(), False
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    summaries = [int(n) for n in _SUMMARY.findall(output)]
    launches = _LAUNCHES.search(output)
    outcome = Outcome(
        tool,
        program,
        int(launches[1]) if launches else None,
        sum(summaries) if summaries else None,
        round(time.monotonic() - begun, 1),
        timed_out,
        process.returncode,
    )
    if not outcome.ok:
        print(f"--- {tool} of {program}: {outcome}\n{output[-4000:]}", file=sys.stderr)
    return outcome


def sanitize(
    sanitizer: str, tools: Sequence[str], *, controls: bool = True, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """Every tool over the kernels; a control first where wanted. Returns what goes out as JSON."""
    python = [sys.executable, "-m", PROGRAM]
    # Compiles what the sanitized runs then find in Triton's cache, and shows that the program is right.
    plain = subprocess.run([*python, "kernels"], cwd=ROOT, capture_output=True, text=True, check=False)
    if plain.returncode:
        lines = (plain.stderr.strip() or plain.stdout.strip()).splitlines()
        return {"ok": False, "error": f"the kernels fail without any tool: {lines[-1] if lines else '?'}"}
    outcomes = []
    for tool in tools:
        for program in ([f"wrong-{tool}"] if controls else []) + ["kernels"]:
            command = [sanitizer, "--tool", tool, "--target-processes", "application-only", *python, program]
            outcomes.append(run_under(tool, program, command, limit_s))
    return {
        "ok": all(o.ok for o in outcomes),
        "sanitizer": sanitizer,
        "launches": {o.tool: o.launches for o in outcomes if o.program == "kernels"},
        "errors": {o.tool: o.errors for o in outcomes if o.program == "kernels"},
        "runs": [asdict(o) for o in outcomes],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated: memcheck, racecheck")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="longest run under a tool, seconds")
    parser.add_argument("--no-controls", action="store_true", help="leave out the kernels that are wrong")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args(arguments)
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"--tools takes {' and '.join(TOOLS)}, not {', '.join(sorted(unknown))}")
    try:
        found = sanitize(find_sanitizer(), tools, controls=not options.no_controls, limit_s=options.limit_s)
    except NoSanitizer as error:
        found = {"ok": False, "error": str(error)}
    line = json.dumps(found)
    print(line)
    if options.out:
        options.out.write_text(line + "\n")
    return 0 if found["ok"] else 1
