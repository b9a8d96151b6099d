"""What a server with these flags will do, found without starting it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from zos_sglang import __version__
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.tools.text import rules as rules_table
from zos_sglang.settings import Settings

_ON_CPU = (
    "On the CPU the forward runs on the scheduler's own thread: steps overlap in their order only, and no "
    "time is saved."
)


def examine(argv: Sequence[str]) -> dict[str, Any]:
    """Resolve flags of `zos_sglang.launch_server` and say what they will do. Ready for JSON.

    Raises:
        ToolError: flags that SGLang or we do not take, or a start that our launcher would refuse.
        SettingsError: bad ZOS_* variables or --zos flags.
    """
    from zos_sglang import launch_server
    from zos_sglang.upstream import preflight, resolve_flags
    from zos_sglang.upstream.versions import installed

    try:
        preflight.check_platform(os.environ)
        flags, rest = launch_server.split(launch_server.merge_config(list(argv)))
        settings = Settings.load(os.environ, flags, launch_server.DEFAULT_MODE)
        preflight.check_version()
        if settings.mode != "off":
            preflight.check_plugin(os.environ)
        resolved = resolve_flags.resolve(rest)
        if settings.mode != "off":
            preflight.check_launcher(resolved.args)
    except (preflight.PreflightError, launch_server.ConfigFileError, resolve_flags.FlagsError) as error:
        raise ToolError(" ".join(str(error).split())) from error
    return {
        "kind": "flags",
        "zos_sglang": __version__,
        "sglang": installed(),
        "device": resolved.device,
        "device_here": resolved.device_here,
        "device_assumed": resolved.assumed,
        "lacking": resolved.lacking,
        **_judge(settings, resolved),
    }


def _judge(settings: Settings, resolved: Any) -> dict[str, Any]:
    from zos_sglang.upstream import lane_forecast, overlap_off

    args, mode = resolved.args, settings.mode or "off"
    facts = lane_forecast.facts_of(args)
    is_open = lane_forecast.backend_is_open(facts, args, resolved.device_here)
    off, alone = overlap_off.overlap_rules(args), overlap_off.loop_rule(args)
    by_mode = overlap_off.mode_rules(mode)
    held = off + [rule for rule in by_mode if rule.code == "mode-sync"]
    closed = [*by_mode, *off, *([alone] if alone else []), *lane_forecast.forecast(facts, is_open)]
    loop = alone.words if alone else "SGLang's synchronous loop" if off else _loop(mode)
    return {
        "mode": mode,
        "model": args.model_path,
        "attention_backend": {"prefill": facts.backends[0], "decode": facts.backends[1], "open": is_open},
        "decode_graphs": facts.graphs,
        "loop": loop,
        "overlap": {"on": not held, "rules": [rule.as_json() for rule in held]},
        "lane": {
            "state": "closed" if closed else "depends" if is_open else "open",
            # One rule often closes several doors under one flag.
            "rules": [
                rule.as_json()
                for rule in {(rule.code, rule.flag): rule for rule in reversed(closed)}.values()
            ][::-1],
        },
        "unresolved": lane_forecast.unresolved(facts, is_open),
        "notes": [_ON_CPU] if facts.on_cpu else [],
    }


def _loop(mode: str) -> str:
    return "SGLang's own loop" if mode in ("off", "stock") else "the loop of zos-sglang"


def show(found: dict[str, Any], console: Console) -> None:
    """Print what `examine` found."""
    backend = found["attention_backend"]
    console.print(
        f"As [bold]python -m zos_sglang.launch_server[/bold] would start it: "
        f"zos-sglang {found['zos_sglang']}, SGLang {found['sglang']}, mode [bold]{found['mode']}[/bold], "
        f"device {found['device']}"
    )
    if found["device_assumed"]:
        console.print("No --device is given, and none is found here: resolved as for --device cuda.")
    elif not found["device_here"]:
        console.print(f"There is no {found['device']} device here: what SGLang asks the device for is open.")
    if found["lacking"]:
        console.print(f"[bold red]It cannot start here as it is:[/bold red] {escape(found['lacking'])}")
        console.print("What it would do if it could:")
    names = (
        backend["decode"]
        if backend["prefill"] == backend["decode"]
        else " / ".join((backend["prefill"], backend["decode"]))
    )
    console.print(
        f"attention backend {'open' if backend['open'] else names}, decode graphs {found['decode_graphs']}, "
        f"{found['loop']}\n"
    )
    _verdict(console, "overlap", "on" if found["overlap"]["on"] else "off", found["overlap"]["rules"])
    shown = found["overlap"]["rules"]
    _verdict(
        console,
        "lane",
        found["lane"]["state"] + (", as overlap is off" if shown else ""),
        [rule for rule in found["lane"]["rules"] if rule not in shown],
    )
    for title, lines in (("Open until it starts", found["unresolved"]), ("Note", found["notes"])):
        for line in lines:
            console.print(f"[bold]{title}:[/bold] {escape(line)}")


def _verdict(console: Console, what: str, state: str, found: list[dict[str, str]]) -> None:
    colour = {"on": "green", "open": "green", "depends": "yellow"}.get(state, "red")
    console.print(f"[bold]{what:8}[/bold] [{colour}]{state}[/{colour}]")
    if found:
        console.print(rules_table(found))
    console.print()
