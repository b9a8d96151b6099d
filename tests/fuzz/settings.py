"""ZOS_* variables, --zos flags, and the trace's path: a value, or one message that names what is wrong."""

from __future__ import annotations

import contextlib
import io
import os

from tests.fuzz.hostile import Choices
from tests.fuzz.runner import Target
from zos_sglang import launch_server, settings
from zos_sglang.modes import MODES
from zos_sglang.settings import Settings, SettingsError
from zos_sglang.upstream import preflight

FIELDS = tuple(Settings.model_fields)
_VALID = {
    field: settings.choices(field)
    or (
        ("0", "1")
        if settings.is_switch(field)
        else ("t.json", "t")
        if settings.is_path(field)
        else ("3", "8")
    )
    for field in FIELDS
}
_WRITTEN = (
    *("1", "0", "10", "1e3", "0x10", "1_000", "\u0661", "+1", " 5 "),
    *("nan", "inf", "-0", "1.5", "true", "ON"),
)


def _text(choices: Choices, field: str) -> str:
    """A value of a setting: right, nearly right, or nothing like it."""
    kind = choices.below(8)
    if kind < 3 and _VALID[field]:
        return choices.pick(_VALID[field])
    word = (
        choices.pick((*_WRITTEN, *MODES))
        if kind < 6
        else choices.text()
        if kind == 6
        else str(choices.number())
    )
    how = choices.below(6)
    return word.upper() if how == 1 else f" {word}\t" if how == 2 else word[:-1] if how == 3 else word


def _environment(choices: Choices) -> dict[str, str]:
    found = {}
    for _ in range(choices.below(5)):
        field = choices.pick(FIELDS)
        name = settings.env_name(field)
        if choices.one_in(12):
            name = choices.pick((name.lower(), name[:-1], f"{name}_X", "ZOS_", "zos", "PATH"))
        found[name] = _text(choices, field)
    return found


def _arguments(choices: Choices) -> list[str]:
    found = []
    for _ in range(choices.below(4)):
        field = choices.pick(FIELDS)
        flag, text = settings.flag_name(field), _text(choices, field)
        if choices.one_in(12):
            flag = choices.pick((flag[:-1], f"{flag}-x", "--zos", "--zos-", "-z", "--port", "--"))
        how = choices.below(8)
        found += [flag] if how == 1 else [flag, text] if how == 2 else [f"{flag}={text}"]
    return found


def make(choices: Choices) -> tuple[dict[str, str], list[str]]:
    """An environment and a command line."""
    return _environment(choices), _arguments(choices)


def check(given: tuple[dict[str, str], list[str]]) -> str:
    """Raises AssertionError where a refusal says nothing, or what was taken does not reach a child."""
    environ, argv = given
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            flags, _ = launch_server.split(argv)
    except SettingsError as error:
        assert str(error).startswith("--zos-")
        return "unknown flag"
    except SystemExit as stop:
        # argparse: a flag without its value.
        assert stop.code == 2
        assert "error: argument --zos-" in said.getvalue()
        return "flag without a value"
    try:
        taken = Settings.load(environ, flags, "resident")
    except SettingsError as error:
        for line in str(error).split("\n"):
            assert len(line) < 6500 and ("llowed" in line or "no setting of this name" in line), line
        return "refused"
    for row in settings.rows(environ, flags, "resident"):
        assert row.value == getattr(taken, row.name.removeprefix("ZOS_").lower())
    child: dict[str, str] = {}
    taken.export(child)
    for text in child.values():
        assert b"\0" not in os.fsencode(text)
    assert Settings.from_env(child) == taken.model_copy(update={"mode": Settings.from_env(child).mode})
    try:
        preflight.check_trace(taken.trace)
    except preflight.PreflightError as error:
        assert "ZOS_TRACE" in str(error)
        return "taken, but for its trace"
    return "taken"


TARGET = Target("settings", "ZOS_* variables and --zos flags", make, check)
