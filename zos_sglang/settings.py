"""Every ZOS_* variable: type, default, range and help, in one frozen object.

A variable's name is its field's name in capitals behind ``ZOS_``; its flag of
``python -m zos_sglang.launch_server`` is ``--zos-`` and the name with dashes. An unknown name, a
bad value or a contradiction raises :class:`SettingsError`, whose text is meant for people.
"""

import difflib
import os
import types
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from zos_sglang.faults import plan
from zos_sglang.modes import MODES, Mode

PREFIX = "ZOS_"
#: Characters of a wrong value that a message repeats.
_SHOWN = 200

ConsecutivePrefill = Literal["never", "always", "first-token"]
Wait = Literal["block", "spin", "poll"]
FirstToken = Literal["in-order", "early"]
LaneMetadata = Literal["own", "upstream"]
Faults = Annotated[str, AfterValidator(lambda text: plan.parse(text) is not None and text)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]


#: What mode `off` would silently ignore. Time-outs, ZOS_WAIT, ZOS_RECORD and ZOS_STRICT are not among them:
#: going back to stock with ZOS_MODE=off must not need them removed.
NOT_WITH_OFF = ("consecutive_prefill", "debug_future_map", "trace", "check_ranks", "fault")


class SettingsError(ValueError):
    """Settings that cannot be used; ``str()`` is the full message, one problem a line."""


class Settings(BaseModel):
    """The values in force. ``mode`` None means that the plugin stays inert."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode | None = Field(
        None,
        description="What the scheduler runs. Unset: the plugin does nothing "
        "(zos_sglang.launch_server then takes resident). off: nothing is patched. sync: one step "
        "at a time. stock: SGLang's own loop, observed. overlap: our loop. resident: our loop, with the "
        "resident decode lane.",
    )
    strict: bool = Field(
        False,
        description="Refuse to start where the plugin would otherwise step aside with a warning "
        "(an SGLang release or a callable that it does not know).",
    )
    consecutive_prefill: ConsecutivePrefill | None = Field(
        None,
        description="When a prefill follows a prefill. never: always overlap them. always: "
        "finish the first before the second starts. first-token: finish it first only if a client "
        "waits for its first token (it streams, or its answer ends there) and the second is not launched as "
        "one CUDA graph, which would not hold that token up. Unset: "
        "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP decides if it is set, else first-token. Has "
        "effect in modes overlap and resident.",
    )
    first_token: FirstToken = Field(
        "early",
        description="When a client waits for the first token of a prefill that the device has finished. "
        "in-order: it goes out after the next decode step is launched, as in SGLang. early: before that; the "
        "device, which has nothing to do until that launch, idles for as long as it takes to send it. early "
        "has effect on one rank only, and not with speculation or a cache on the host: there it is in-order. "
        "Modes overlap and resident.",
    )
    exit_timeout_s: Seconds = Field(
        10.0,
        ge=0,
        le=14,
        description="Seconds that a graceful exit may spend on finishing and streaming the steps in flight. "
        "SGLang kills a scheduler 15 seconds after it asked it to exit.",
    )
    stall_timeout_s: Seconds = Field(
        120.0,
        ge=0,
        le=86400,
        description="Seconds without progress after which the scheduler writes to its log what "
        "is in flight; 0 turns the detector off.",
    )
    debug_future_map: bool = Field(
        False,
        description="Check that every token handed from step to step on the device is read once "
        "and by the request that it belongs to. Slow.",
    )
    wait: Wait = Field(
        "block",
        description="How the scheduler thread waits for the tokens of a step. block: it sleeps. spin: the "
        "driver polls, which may slow other ranks. poll: Python asks the driver again and again, so the "
        "thread goes on executing, and other threads of its process hardly run meanwhile. CUDA only: "
        "elsewhere there is one way.",
    )
    lane_window: int = Field(
        32,
        ge=1,
        le=256,
        description="Decode steps for which the resident lane reserves KV slots at a time. Longer: fewer "
        "reservations. Shorter: less memory held ahead of time. Mode resident.",
    )
    lane_ring: int = Field(
        4,
        ge=3,
        le=64,
        description="Slots of the ring that carries the lane's tokens to the host. Mode resident.",
    )
    lane_metadata: LaneMetadata = Field(
        "own",
        description="What prepares attention metadata inside the lane's graphs. own: our kernels. upstream: "
        "SGLang's code. Mode resident.",
    )
    record: bool = Field(
        True,
        description="Keep a record of every step: what ran, why it did not overlap, where the time went. "
        "Metrics, traces, signs and reports are made from it. Not in mode off.",
    )
    trace: str | None = Field(
        None,
        min_length=1,
        description="Write every step to this file as Chrome trace events, for Perfetto and for "
        "`python -m zos_sglang report`. Rank 0 writes FILE, other ranks beside it. Unset: no trace.",
    )
    trace_mb: int = Field(
        64,
        ge=1,
        le=1024,
        description="Size at which a trace ends, in MB.",
    )
    check_ranks: int = Field(
        0,
        ge=0,
        le=4096,
        description="Compare what the ranks of a tensor-parallel group decide, so many decisions at a time. "
        "On a difference the log names the first differing field with both values, and the server is "
        "stopped. 0 turns the check off. Modes sync, overlap and resident.",
    )
    fault: Faults | None = Field(
        None,
        description="Make steps of ours fail, to see that nothing is lost: each at a call of its own, once, "
        "or with + from then on. For tests only. on: none yet, see docs/reliability.md. Unset: no such code "
        "runs.",
    )

    @field_validator("trace")
    @classmethod
    def _names_a_file(cls, path: str | None) -> str | None:
        """A path that the system can be asked for; one with a null byte no process could hand on."""
        if path is not None and b"\0" in os.fsencode(path):
            raise ValueError("a path holds no null byte")
        return path

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Settings of an environment. Raises :class:`SettingsError`."""
        return cls.load(environ)

    @classmethod
    def load(
        cls,
        environ: Mapping[str, str],
        flags: Mapping[str, str] | None = None,
        default_mode: Mode | None = None,
    ) -> Self:
        """Settings of an environment and of flags (field name to text); a flag wins.

        `default_mode` is used where neither sets the mode. Raises :class:`SettingsError`.
        """
        given, problems = _gather(environ, flags or {})
        values = {name: item.text for name, item in given.items()}
        if default_mode is not None:
            values.setdefault("mode", default_mode)
        try:
            settings = cls.model_validate(values)
        except ValidationError as error:
            bad = dict.fromkeys(str(e["loc"][0]) for e in error.errors())
            problems += [_bad_value(name, given[name]) for name in bad]
        else:
            problems += _contradictions(settings, given)
        if problems:
            raise SettingsError("\n".join(problems))
        return settings

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Write these settings into `environ`, so that child processes read the same ones."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value == field.default:
                environ.pop(env_name(name), None)
            else:
                environ[env_name(name)] = as_text(value)


@dataclass(frozen=True)
class Given:
    """One value that somebody set: its text and the name it was set by."""

    text: str
    source: Literal["environment", "flag"]
    name: str


@dataclass(frozen=True)
class Row:
    """One setting as people see it."""

    name: str
    flag: str
    type: str
    default: str | float | bool | None
    allowed: str
    help: str
    value: str | float | bool | None
    source: str


def env_name(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()


def flag_name(field: str) -> str:
    """The command-line flag of a field."""
    return "--zos-" + field.replace("_", "-")


def as_text(value: object) -> str:
    """A value as it stands in the environment."""
    whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return f"{value:.0f}" if whole else str(value)


def shown(text: str) -> str:
    """A value that somebody set, as a message repeats it: one line, not too long, no control codes."""
    short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return short if short.isprintable() else ascii(short)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean X?`` for the nearest of `known`, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def choices(field: str) -> tuple[str, ...]:
    """The words that a setting takes, or () where it takes no words."""
    annotation = _annotation(field)
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def is_switch(field: str) -> bool:
    """Whether a setting is on or off."""
    return _annotation(field) is bool


def is_path(field: str) -> bool:
    """Whether a setting names a file."""
    return _annotation(field) is str


def allowed(field: str) -> str:
    """What a setting takes, in words."""
    if words := choices(field):
        return ", ".join(words)
    if is_path(field):
        return "a path"
    if field == "fault":
        return plan.allowed()
    if is_switch(field):
        return "0 or 1"
    limits = {type(m).__name__: m for m in Settings.model_fields[field].metadata}
    return f"a number from {limits['Ge'].ge:g} to {limits['Le'].le:g}"


def rows(
    environ: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    default_mode: Mode | None = None,
) -> list[Row]:
    """Every setting with its value and where that came from. Raises :class:`SettingsError`."""
    settings = Settings.load(environ, flags, default_mode)
    given, _ = _gather(environ, flags or {})
    return [
        Row(
            name=env_name(name),
            flag=flag_name(name),
            type=_kind(name),
            default=field.default,
            allowed=allowed(name),
            help=field.description or "",
            value=getattr(settings, name),
            source=given[name].source if name in given else "default",
        )
        for name, field in Settings.model_fields.items()
    ]


def as_json(table: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as plain data for JSON."""
    return [asdict(row) for row in table]


def _kind(field: str) -> str:
    if choices(field):
        return "choice"
    if field == "fault":
        return "faults"
    return "switch" if is_switch(field) else "path" if is_path(field) else "number"


def _annotation(field: str) -> Any:
    """A field's type without its ``| None``."""
    annotation = Settings.model_fields[field].annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next(a for a in get_args(annotation) if a is not type(None))
    return annotation


def _gather(environ: Mapping[str, str], flags: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """What is set, by field, and one message for each ZOS_* name that we do not know.

    An empty variable counts as unset: that is how shells and compose files unset one.
    """
    fields = {env_name(name): name for name in Settings.model_fields}
    given: dict[str, Given] = {}
    problems = []
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in fields:
            problems.append(
                f"{variable}={shown(text)}: there is no setting of this name."
                f"{did_you_mean(variable, fields)} All names: {', '.join(fields)}."
            )
        elif text.strip():
            given[fields[variable]] = Given(text.strip(), "environment", variable)
    for name, text in flags.items():
        given[name] = Given(text.strip(), "flag", flag_name(name))
    return given, problems


def _bad_value(field: str, given: Given) -> str:
    hint = did_you_mean(given.text.lower(), choices(field))
    return f"{given.name}={shown(given.text)}: not allowed. Allowed: {allowed(field)}.{hint}"


def _contradictions(settings: Settings, given: Mapping[str, Given]) -> list[str]:
    """Requests that mode `off` would silently ignore; every other mode can become `overlap` live."""
    if settings.mode != "off":
        return []
    by = given["mode"].name if "mode" in given else env_name("mode")
    return [
        f"{given[field].name}={shown(given[field].text)} contradicts {by}=off, where it has no "
        f"effect. Allowed with it: {by}={'|'.join(m for m in MODES if m != 'off')}. Remove one of the two."
        for field in NOT_WITH_OFF
        if field in given and getattr(settings, field)
    ]
