"""Command line of scripts/run_plan.py: many measurements on one machine, started together, made in turns.

Starting a server takes longer than most measurements. So all servers of a plan start at once; whoever is
ready sleeps (SIGSTOP) until it is its turn, and takes no time from the one at work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from zos_sglang.testing.bench.command import say
from zos_sglang.testing.bench.ending import COULD_NOT, exiting_on
from zos_sglang.testing.bench.record import write_json
from zos_sglang.testing.server import TURN, dying_with_us, each_of_tree, ready_file

#: Seconds between two looks at what is under way.
LOOK_S = 0.5

DESCRIPTION = """\
Runs the commands of PLAN, a TOML file, each with its output in OUT/NAME.txt. Those of one queue run one after
the other, queues beside each other. Servers of all start at once and sleep (SIGSTOP) until their turn."""
EPILOG = """\
A job is a table [[job]]: name, command ({out} is OUT), and what is not as in [defaults]: gpu (0), queue (that
of the GPU), after (names of jobs of other queues), cores (all; "0-15"), limit_s (600, from its turn), start_s
(480), ahead (true: start its one server at once; nobody measures before all of these are ready), env.
Exit code: 0 every command ended with 0, 1 some did not, 2 could not run."""


class PlanError(ValueError):
    """The plan is not one."""


class State(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True)
class Job:
    """One command of a plan."""

    name: str
    command: str
    gpu: int = 0
    queue: str = ""
    after: Sequence[str] = ()
    cores: str = ""
    limit_s: float = 600
    start_s: float = 480
    ahead: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    def words(self, out: Path) -> list[str]:
        """The command line."""
        pinned = ["taskset", "-c", self.cores] if self.cores else []
        return [*pinned, sys.executable, *shlex.split(self.command.replace("{out}", str(out)))]


def plan_of(text: str) -> list[Job]:
    """The jobs of a plan. Raises PlanError."""
    try:
        plan = tomllib.loads(text)
        jobs = [Job(**{**plan.get("defaults", {}), **one}) for one in plan.get("job", [])]
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"not TOML: {error}") from error
    except TypeError as error:
        known = ", ".join(one.name for one in fields(Job))
        raise PlanError(f"{error}; a job has {known}") from error
    names = [job.name for job in jobs]
    if double := {name for name in names if names.count(name) > 1}:
        raise PlanError(f"more than one job is called {', '.join(sorted(double))}")
    for place, job in enumerate(jobs):
        if unknown := set(job.after) - set(names[:place]):
            raise PlanError(f"{job.name}: after: no job {', '.join(sorted(unknown))} stands before it")
    return jobs


class Run:
    """One job, its process, and when it did what (seconds, `time.monotonic`)."""

    def __init__(self, job: Job, out: Path) -> None:
        self.job, self.out = job, out
        self.log = out / f"{job.name}.txt"
        self.state = State.WAITING
        self.code: int | None = None
        self.began = self.turn_at = self.ended = 0.0
        self._turn = out / f"{job.name}.turn"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command; unless it starts ahead, its turn has come."""
        self.began = time.monotonic()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(self.job.gpu), **self.job.env}
        if self.job.ahead:
            env[TURN] = str(self._turn)
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                # A stopped process does not notice that it is alone.
                [*dying_with_us(), *self.job.words(self.out)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.state = State.STARTING

    def take_turn(self) -> None:
        """From here on it measures, as soon as it is ready."""
        if self.state == State.WAITING:
            self.start()
        self._each(psutil.Process.resume)
        self._turn.touch()
        self.turn_at, self.state = time.monotonic(), State.RUNNING

    def look(self) -> None:
        """See whether it is ready or has ended; a ready one sleeps."""
        if self._process is None or self.state == State.DONE:
            return
        if self._process.poll() is not None:
            self._end(self._process.returncode)
        elif self.state == State.STARTING and ready_file(self._turn).exists():
            self._each(psutil.Process.suspend)
            self.state = State.READY
        elif self._late():
            self.kill()

    def _late(self) -> bool:
        now, job = time.monotonic(), self.job
        if self.state == State.STARTING:
            return now - self.began > job.start_s
        return self.state == State.RUNNING and now - self.turn_at > job.limit_s

    def kill(self) -> None:
        """End it and all that it has started."""
        self._each(psutil.Process.kill)
        if self._process is not None and self.state != State.DONE:
            self._end(self._process.wait())

    def _end(self, code: int) -> None:
        self.code, self.state, self.ended = code, State.DONE, time.monotonic()

    def _each(self, action: Callable[[psutil.Process], None]) -> None:
        if self._process is not None:
            each_of_tree(self._process.pid, action)

    def report(self) -> dict[str, Any]:
        """What is known, for state.json."""
        now = self.ended or time.monotonic()
        return {
            "name": self.job.name,
            "state": str(self.state),
            "code": self.code,
            "started_s": round(now - self.began) if self.began else None,
            "turn_s": round(now - self.turn_at) if self.turn_at else None,
            "last": last_line(self.log),
        }


def last_line(log: Path) -> str:
    """The last line with something in it, at most 160 characters."""
    text = ""
    with contextlib.suppress(OSError), log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - 4096))
        text = source.read().decode(errors="replace")
    lines = [line.rsplit("\r", 1)[-1].strip() for line in text.splitlines()[-20:]]
    return next((line[-160:] for line in reversed(lines) if line), "")


def queues_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by queue, in the plan's order."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.job.queue or f"gpu {run.job.gpu}", []).append(run)
    return list(found.values())


def steps(runs: Sequence[Run]) -> Iterator[None]:
    """Run them all; yields after every look at them. Turns begin when all that start ahead are ready."""
    queues, by_name = queues_of(runs), {run.job.name: run for run in runs}
    for run in runs:
        if run.job.ahead:
            run.start()
    while any(run.state != State.DONE for run in runs):
        for run in runs:
            run.look()
        if not any(run.state == State.STARTING for run in runs):
            for queue in queues:
                first = next((run for run in queue if run.state != State.DONE), None)
                if first is not None and first.state != State.RUNNING and _may(first, by_name):
                    first.take_turn()
        yield


def _may(run: Run, by_name: Mapping[str, Run]) -> bool:
    # Those that --only left out are not waited for.
    return all(by_name[name].state == State.DONE for name in run.job.after if name in by_name)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        prog="run_plan.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    found.add_argument("plan", type=Path, metavar="PLAN", nargs="?", help="the TOML file")
    found.add_argument("--out", type=Path, required=True, metavar="OUT", help="folder for all output")
    found.add_argument("--only", action="append", default=[], metavar="NAME", help="this job; repeatable")
    found.add_argument("--state", action="store_true", help="say where the plan that runs in OUT stands")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a plan, or say where one stands; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        if args.state:
            return _print(json.loads((args.out / "state.json").read_text()))
        if args.plan is None:
            raise PlanError("name a plan, or ask with --state how one is doing")
        jobs = plan_of(args.plan.read_text())
        if unknown := set(args.only) - {job.name for job in jobs}:
            raise PlanError(f"no job {', '.join(sorted(unknown))} in {args.plan}")
    except (OSError, ValueError) as error:
        print(f"run_plan: error: {error}", file=sys.stderr)
        return COULD_NOT
    return run([job for job in jobs if not args.only or job.name in args.only], args.out)


def run(jobs: Sequence[Job], out: Path) -> int:
    """Run the jobs; state.json in `out` always says where they are. Returns the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("*.turn"), *out.glob("*.turn.ready")):
        stale.unlink()
    runs = [Run(job, out.resolve()) for job in jobs]

    with exiting_on(signal.SIGTERM, signal.SIGHUP):
        _follow(runs, out / "state.json")
    return int(any(one.code for one in runs))


def _follow(runs: Sequence[Run], state: Path) -> None:
    known: dict[str, State] = {}
    try:
        for _ in steps(runs):
            found = {one.job.name: one.state for one in runs}
            if found != known:
                _say_changes(runs, known)
                known = found
            write_json(state, [one.report() for one in runs])
            time.sleep(LOOK_S)
    finally:
        for one in runs:
            one.kill()
        write_json(state, [one.report() for one in runs])


def _say_changes(runs: Sequence[Run], known: Mapping[str, State]) -> None:
    for one in runs:
        if one.state != known.get(one.job.name):
            code = "" if one.code is None else f", exit code {one.code}: {last_line(one.log)}"
            say(f"{one.job.name}: {one.state}{code}")


def _print(state: Sequence[Mapping[str, Any]]) -> int:
    for one in state:
        code = "" if one["code"] is None else f" {one['code']}"
        times = f"{one['turn_s'] or 0:5} s of {one['started_s'] or 0:5}"
        print(f"{one['name']:<14} {one['state']}{code:<4} {times}  {one['last']}")
    return 0
