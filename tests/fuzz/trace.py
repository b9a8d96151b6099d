"""The trace reader and the report: a trace or one sentence, and no words of a trace become markup."""

from __future__ import annotations

import atexit
import base64
import json
import re
import shutil
import tempfile
import zlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import hostile
from tests.fuzz.hostile import Choices
from tests.fuzz.runner import Target
from tests.unit.made_records import records, steady
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.names import COLUMNS
from zos_sglang.observe.record import STEP
from zos_sglang.observe.tools import report
from zos_sglang.observe.tools.report_page import page
from zos_sglang.observe.trace_reader import read
from zos_sglang.observe.trace_sink import TraceSink

_FACTS = {
    "asynchronous": True,
    "mode": "resident",
    "model": "tiny-qwen3",
    "versions": {"sglang": "0.5.23", "torch": "2"},
}
#: What a page consists of. Anything else came from the trace.
_TAGS = frozenset(
    [
        *("!doctype", "html", "head", "meta", "title", "style", "body", "main", "section", "header"),
        *("h1", "h2", "small", "p", "div", "b", "span", "i", "button", "canvas", "script", "table", "thead"),
        *("tbody", "tr", "th", "td", "figure", "figcaption", "svg", "rect", "line", "text", "g", "path"),
        *("title", "polyline"),
    ]
)
#: Of traces with steps, one in so many is also drawn: a page takes ten times as long as reading.
_DRAWN = 8


@cache
def _file(name: str) -> Path:
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="zos-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, made, True)
    return made / name


@cache
def _valid() -> tuple[list[str], ...]:
    """Lines of whole traces, without the brackets around them."""
    made = (
        steady(6, gpu=1.4, cpu=0.7),
        steady(5, gpu=0.3, cpu=0.6, overlap=False),
        records(3, departure="finish", refusal="grammar", path="resident", mode="resident"),
        records(0),
    )
    found = []
    for one in made:
        sink = TraceSink(_file("valid.json"), 10**7, _FACTS, "scheduler 0")
        sink(one)
        sink.close()
        found.append(_file("valid.json").read_text().strip()[2:-2].split(",\n"))
    return tuple(found)


def _record(choices: Choices, good: str) -> str:
    """A record with some numbers changed, to any at all or to words that there are."""
    found = np.frombuffer(bytearray(base64.b64decode(good)), STEP)
    for _ in range(1 + choices.below(4)):
        name = choices.pick(STEP.names)
        kind = np.iinfo(STEP[name])
        if name in COLUMNS and choices.below(4):
            found[name] = choices.below(len(COLUMNS[name]) + 1)
        elif choices.below(2):
            found[name] = choices.pick([0, kind.max, kind.min, 1])
        else:
            found[name] = int(kind.min) + choices.below(int(kind.max) - int(kind.min) + 1)
    return base64.b64encode(found.tobytes()).decode()


def _event(choices: Choices, line: str) -> str:
    """One event with one thing in it changed."""
    event: dict[str, Any] = json.loads(line)
    args = event.get("args", {})
    if "record" in args and choices.below(3):
        args["record"] = _record(choices, args["record"])
    elif "facts" in args and choices.below(2):
        key = choices.pick(("model", "mode", "versions"))
        args["facts"] = {**args["facts"], key: choices.value(), choices.text(): "x"}
    elif "facts" in args and choices.below(2):
        part = choices.pick(("layout", "columns", "facts", "version", "format", "process"))
        args[part] = choices.replaced(args[part])
    else:
        event = choices.replaced(event)
    return json.dumps(event)


def make(choices: Choices) -> bytes:
    """A trace's file."""
    lines = list(choices.pick(_valid()))
    # The first events name the tracks; what is read stands behind them.
    begin = next(number for number, line in enumerate(lines) if '"zos_meta"' in line)
    for at in {begin + choices.below(len(lines) - begin) for _ in range(choices.below(4))}:
        lines[at] = _event(choices, lines[at])
    content = ("[\n" + ",\n".join(lines) + "\n]\n").encode("utf-8", "surrogatepass")
    how = choices.below(12)
    if how == 1:
        return choices.cut(content)
    if how == 2:
        return choices.moved_line(content)
    if how == 3:
        # As other tools write it: one line, or an object.
        one_line = content.replace(b"\n", b"")
        return choices.pick([one_line, b'{"traceEvents":' + one_line + b"}", b'{"traceEvents":3}'])
    if how == 4:
        return content[: choices.below(200)] + choices.take(30)
    if how == 5:
        return b"[\n" + hostile.nested(choices.pick([900, 5000, 100_000])) + b",\n" + content[2:]
    return content


def check(content: bytes) -> str:
    """Raises what reading or reporting lets through besides ToolError; AssertionError for foreign markup."""
    path = _file("trace.json")
    path.write_bytes(content)
    try:
        trace = read(path)
        if len(trace.records) and zlib.crc32(content) % _DRAWN:
            return "steps"
        numbers = report.figures(trace)
    except ToolError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return "refused"
    json.dumps(numbers)
    # A file may be called anything too.
    shown = page(hostile.MARKUP[len(content) % len(hostile.MARKUP)], trace, numbers)
    report._write(_file("page.html"), shown, path, force=False)
    assert_own_markup(shown)
    return "steps, drawn" if len(trace.records) else "no steps, drawn"


def assert_own_markup(shown: str) -> None:
    """Every element of the page is one that the report makes, and none runs or loads what it should not."""
    for own in _own_sources():
        shown = shown.replace(own, "")
    tags = re.findall(r"<[^>]*>?", shown)
    names = {re.match(r"</?([^\s>]*)", tag)[1] for tag in tags}  # type: ignore[index]
    assert names <= _TAGS, names - _TAGS
    assert not re.search(r"[\s\"'/](on\w+|src|href|srcdoc|action|formaction|data)\s*=", "".join(tags))
    assert shown.count("<script") in (0, 2)


@cache
def _own_sources() -> tuple[str, ...]:
    """The style and the script, which are no trace's."""
    return tuple(
        resources.files(report.__package__).joinpath(f"report.{kind}").read_text("utf-8")
        for kind in ("css", "js")
    )


TARGET = Target("trace", "the trace reader and the report", make, check)
