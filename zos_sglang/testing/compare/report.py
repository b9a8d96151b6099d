"""What comes of it: a table and the first differing request in full for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zos_sglang.testing.compare import lane
from zos_sglang.testing.compare.records import Record
from zos_sglang.testing.compare.runner import Played, Result, decisions

LONG = 2000


def print_report(console: Console, results: list[Result], title: str, *, resident: bool = False) -> None:
    """Print the table, every fault, and of each failed scenario the first difference in full.

    `resident` adds what the lane did.
    """
    console.print(_table(results, title, resident))
    for result in results:
        if result.skipped:
            console.print(f"[yellow]not on CPU[/]: {result.scenario.name}: {escape(result.skipped)}")
        if not result.passed:
            _print_failure(console, result)
    if resident:
        console.print(lane.summary(lane_total(results)), markup=False, highlight=False, soft_wrap=True)
    console.print(totals(results))


def lane_total(results: list[Result]) -> lane.Counters:
    """Our servers' counters over all scenarios, and the lane's of their starts (where it stays closed)."""
    played = [r for r in results if not r.skipped]
    firsts = {r.scenario.config.name: r.ours.before for r in reversed(played)}
    at_start = [{k: n for k, n in first.items() if k.startswith("lane.")} for first in firsts.values()]
    return lane.total([*(r.ours.zos for r in played), *at_start])


def totals(results: list[Result]) -> str:
    """Counts of scenarios, requests and tokens of a run, in one line."""
    played = [r for r in results if not r.skipped]
    failed = [r.scenario.name for r in played if not r.passed]
    requests = sum(len(r.ours.records) for r in played)
    tokens = sum(r.ours.tokens for r in played)
    line = (
        f"{len(played) - len(failed)} of {len(played)} scenarios equal; "
        f"{requests} requests and {tokens} tokens of ours"
    )
    if skipped := [r.scenario.name for r in results if r.skipped]:
        line += f"; not on CPU: {', '.join(skipped)}"
    return line + (f"; FAILED: {', '.join(failed)}" if failed else "")


def _table(results: list[Result], title: str, resident: bool) -> Table:
    table = Table(title=title)
    for heading, justify in (
        ("scenario", "left"),
        ("requests", "right"),
        ("tokens", "right"),
        ("equal", "left"),
        ("fired on ours", "left"),
        ("launches of ours", "left"),
        *([("decode steps in the lane", "left")] if resident else []),
        ("stock s", "right"),
        ("ours s", "right"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for result in results:
        if result.skipped:
            table.add_row(result.scenario.name, "", "", "[yellow]not on CPU[/]")
            continue
        table.add_row(
            result.scenario.name,
            str(len(result.ours.records)),
            str(result.ours.tokens),
            "[green]yes[/]" if result.passed else "[red]NO[/]",
            escape(", ".join(f"{_plain(k)} {n}" for k, n in result.ours.found.items())),
            escape(decisions(result.ours.zos)) if result.ours.zos else "",
            *([lane.line(result.ours.zos)] if resident else []),
            f"{result.stock.seconds:.1f}",
            f"{result.ours.seconds:.1f}",
        )
    return table


def _plain(key: str) -> str:
    return key.removeprefix("reasons.").removeprefix("paths.")


def _print_failure(console: Console, result: Result) -> None:
    name = result.scenario.name
    console.print(f"\n[bold red]{name}[/]")
    for fault in result.faults:
        console.print(f"  {escape(fault)}", soft_wrap=True)
    if not result.differences:
        return
    first = result.differences[0]
    more = len(result.differences) - 1
    console.print(f"  {len({d.record for d in result.differences})} answers differ; the first:")
    console.print(f"  {escape(str(first))}" + (f" (and {more} more)" if more else ""), soft_wrap=True)
    for label, value in (
        ("sent", _sent(result, first.record)),
        ("stock", _answer(result.stock, first.record)),
        ("ours", _answer(result.ours, first.record)),
    ):
        console.print(f"    {label}: {escape(value)}", soft_wrap=True)


def _sent(result: Result, name: str) -> str:
    # Further answers of one request (NAME[1]) were asked for by NAME.
    record = result.stock.records.get(name.split("[", maxsplit=1)[0]) or result.ours.records.get(name)
    return _dump(record.sent) if record else "?"


def _answer(played: Played, name: str) -> str:
    record: Record | None = played.records.get(name)
    if record is None:
        return "(no answer)"
    shown = {k: v for k, v in record.as_json().items() if v and k not in ("sent", "fields", "name")}
    return _dump(shown)


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONG else text[:LONG] + f"... ({len(text)} characters)"


def document(results: list[Result], run: dict[str, Any], *, resident: bool = False) -> dict[str, Any]:
    """Everything that the table shows, and all differences; `as_text` makes JSON of it.

    `run` describes the run itself (suite, model, mode, versions). Answers are not repeated where
    they are equal. `resident` adds what the lane did.
    """
    return {
        "run": run,
        "totals": totals(results),
        **({"lane": lane.block(lane_total(results))} if resident else {}),
        **({"ranks": ranks} if (ranks := ranks_total(results)) else {}),
        "scenarios": [_result_json(result, resident) for result in results],
    }


def as_text(found: dict[str, Any], indent: int | None = None) -> str:
    """A document as JSON, on one line unless `indent` is given."""
    return json.dumps(found, indent=indent, ensure_ascii=False, default=str)


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a document, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(found, indent=1) + "\n")


def ranks_total(results: list[Result]) -> dict[str, int]:
    """What the rank-consensus check counted over all scenarios; empty where it was off."""
    summed = lane.total(result.ours.zos for result in results)
    return {name.removeprefix("ranks."): n for name, n in summed.items() if name.startswith("ranks.")}


def _result_json(result: Result, resident: bool) -> dict[str, Any]:
    if result.skipped:
        return {"scenario": result.scenario.name, "not_on_cpu": result.skipped}
    return {
        "scenario": result.scenario.name,
        "about": result.scenario.about,
        "config": result.scenario.config.name,
        "args": list(result.scenario.config.args),
        "equal": result.passed,
        "requests": len(result.ours.records),
        "tokens": result.ours.tokens,
        "seconds": {"stock": result.stock.seconds, "ours": result.ours.seconds},
        "fired": {"stock": result.stock.found, "ours": result.ours.found},
        "zos": {k: n for k, n in result.ours.zos.items() if not k.startswith("lane.")},
        **({"lane": lane.block(result.ours.zos)} if resident else {}),
        "faults": result.faults,
        "differences": [d.__dict__ for d in result.differences],
        "differing": {
            name: {"stock": _side(result.stock, name), "ours": _side(result.ours, name)}
            for name in sorted({d.record for d in result.differences})
        },
    }


def _side(played: Played, name: str) -> dict[str, Any] | None:
    return played.records[name].as_json() if name in played.records else None
