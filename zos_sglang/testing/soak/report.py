"""The verdict on a soak: checks, figures, a table for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from zos_sglang.console import console
from zos_sglang.testing.bench.check import Check
from zos_sglang.testing.soak.run import Soak
from zos_sglang.testing.soak.watch import growth

#: Lines of a server's log that no soak may cause.
_BAD = re.compile(
    r"Scheduler hit an exception|memory leak|leak detected|kv_canary violation|canary violation detected"
    r"|zos-sglang: (?:our launch failed|the resident lane|a guard failed|could not attach)"
)
#: What a soak of at least so many minutes must have seen; a short one has no time for all of it.
_WHOLE_MINUTES = 3.0
#: The slope of a few points a minute apart is noise.
_TREND_MINUTES = 5.0
#: From so many minutes on, what a process may still grow by in a minute: MB, descriptors.
LIMITS = ((30.0, 0.5, 1.0), (_TREND_MINUTES, 2.0, 1.0))
#: Of the lane's counters.
_OF_LANE = ("share", "steps", "opened", "left", "rows_left", "refused", "faults")


def report_of(soak: Soak) -> dict[str, Any]:
    """Figures and checks; `passed` says whether all of these hold."""
    tally, zos = soak.tally, soak.zos
    lane, paths = zos.get("lane", {}), zos.get("paths", {})
    found: dict[str, Any] = {
        "minutes": round(soak.samples[-1].minute, 2) if soak.samples else 0.0,
        "seed": soak.settings.seed,
        "scale": asdict(soak.settings.scale),
        "requests": tally.requests,
        "output_tokens": tally.output_tokens,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "retractions": tally.retractions,
        "longest_request_s": round(tally.longest_s, 2),
        "disturbances": dict(sorted(soak.disturber.done.items())),
        "mode_seconds": dict(soak.disturber.seconds),
        "mode_switches": paths.get("mode-switches", 0),
        "faults_survived": lane.get("faults", 0) + paths.get("fallbacks", 0),
        "reasons": zos.get("reasons", {}),
        "lane": {name: lane.get(name) for name in _OF_LANE},
        "growth": growth(soak.samples),
        "idle": [sample.as_json() for sample in soak.samples],
        "wrong": tally.wrong,
    }
    checks = checks_of(soak, found)
    found["checks"] = [asdict(check) for check in checks]
    found["passed"] = all(check.ok for check in checks)
    return found


def checks_of(soak: Soak, found: Mapping[str, Any]) -> list[Check]:
    """What must hold."""
    tally, samples = soak.tally, soak.samples
    log = soak.server.log_text()
    bad = sorted({match.group(0) for match in _BAD.finditer(log)})
    expected_faults = soak.settings.faults
    checks = [
        Check("the server lived through it", tally.broken is None and soak.server.alive, tally.broken),
        Check("every answer and control call as it must be", tally.wrong_count == 0, tally.wrong_count),
        Check("at least two idle moments, pool and queue empty in each", len(samples) > 1, len(samples)),
        Check("nothing bad in the server's log", not bad or expected_faults, bad),
        Check(
            "no fault of ours, unless asked for",
            expected_faults or found["faults_survived"] == 0,
            found["faults_survived"],
        ),
    ]
    if found["minutes"] >= _WHOLE_MINUTES:
        seen = {**found["outcomes"], **found["disturbances"], "retracted": found["retractions"]}
        wanted = ("finished", "aborted", "hung up", "retracted", *soak.disturber.kinds)
        checks.append(Check("all of it happened", all(seen.get(n) for n in wanted), seen))
        if "resident" in soak.settings.modes:
            checks.append(Check("decode steps rode the lane", bool(found["lane"]["steps"]), found["lane"]))
    limits = next(((mb, fds) for minutes, mb, fds in LIMITS if found["minutes"] >= minutes), None)
    if limits is not None:
        for name, limit in zip(("rss_mb_per_minute", "fds_per_minute"), limits, strict=True):
            rates = {process: seen[name] for process, seen in found["growth"].items()}
            holds = all(rate <= limit for rate in rates.values())
            checks.append(Check(f"{name} at most {limit:g}", holds, rates))
    return checks


def print_report(found: Mapping[str, Any]) -> None:
    """The table, faults first."""
    from rich.table import Table

    for sentence in found["wrong"]:
        print(f"WRONG {sentence}")
    table = Table(title=f"soak of {found['minutes']:g} minutes, seed {found['seed']}", show_header=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    ends = ", ".join(f"{n} {what}" for what, n in found["outcomes"].items())
    table.add_row("requests", f"{found['requests']} ({ends})")
    table.add_row("output tokens", str(found["output_tokens"]))
    table.add_row("retractions", str(found["retractions"]))
    table.add_row("disturbances", ", ".join(f"{what} {n}" for what, n in found["disturbances"].items()))
    table.add_row("seconds in a mode", ", ".join(f"{m} {n}" for m, n in found["mode_seconds"].items()))
    table.add_row("faults survived", str(found["faults_survived"]))
    table.add_row("lane's share", str(found["lane"]["share"]))
    for name, seen in found["growth"].items():
        words = f"{seen['rss_mb']} MB, {seen['rss_mb_per_minute']:+} MB a minute"
        table.add_row(name, f"{words}; {seen['fds']} descriptors, {seen['fds_per_minute']:+} a minute")
    for check in found["checks"]:
        table.add_row("holds" if check["ok"] else "DOES NOT HOLD", f"{check['what']}: {check['found']}")
    console().print(table)
    print("PASS" if found["passed"] else "FAIL")
