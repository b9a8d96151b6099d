"""docs/observability.md names what there is, all of it, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from zos_sglang.cli import _parser
from zos_sglang.observe import names
from zos_sglang.observe.metric_families import FAMILIES
from zos_sglang.observe.signs import Sign, Verdict
from zos_sglang.observe.tools import doctor_server
from zos_sglang.overlap.guards import Reason
from zos_sglang.settings import Settings, env_name
from zos_sglang.upstream.record_handlers import record_handlers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "observability.md"
TEXT = PAGE.read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

VARIABLES = {env_name(field) for field in Settings.model_fields}
HANDLERS = set(record_handlers(SimpleNamespace()))
METRICS = {family.name for family in FAMILIES}
#: Words that look like a metric and are none.
OTHERS = {"zos_sglang"}
COMMANDS = re.findall(r"^    (?:ZOS_\w+=\S+ )?python -m zos_sglang (.*?)(?:  +#.*)?$", TEXT, re.M)
LINKS = re.findall(r"\]\(([^)#\s]+)\)", TEXT)
LOCAL = [link for link in LINKS if "://" not in link]


def named(word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", TEXT) is not None


def test_every_variable_exists() -> None:
    assert set(re.findall(r"\bZOS_[A-Z_]+\b", TEXT)) <= VARIABLES


def test_every_metric_and_handler_exists_and_is_named() -> None:
    found = set(re.findall(r"\bzos_[a-z_]+\b", TEXT))
    assert found - METRICS - HANDLERS - OTHERS == set()
    assert METRICS - found == set()
    assert HANDLERS - found == set()


def test_labels_of_metrics_are_named() -> None:
    assert [label for family in FAMILIES for label in family.labels if not named(label)] == []


@pytest.mark.parametrize(
    "words",
    [names.Path, names.Block, names.Ready, names.Work, Reason, Sign, {Verdict.CANNOT_TELL}],
    ids=["path", "block", "ready", "work", "reason", "sign", "verdict"],
)
def test_every_word_of_a_record_is_explained(words: list[str]) -> None:
    assert [str(word) for word in words if f"`{word}`" not in TEXT] == []


def test_every_command_can_be_parsed() -> None:
    parser = _parser()
    for command in COMMANDS:
        args, rest = parser.parse_known_args(shlex.split(command))
        assert not rest or args.command == "doctor", command
    asked = {command.split()[0] for command in COMMANDS}
    assert asked == {"top", "doctor", "simulate", "report"}
    assert {command for command in re.findall(r"python -m zos_sglang (\w+)", TEXT)} == asked


def test_bodies_for_the_server_are_json_with_known_keys() -> None:
    bodies = [json.loads(body) for body in re.findall(r"-d '(\{.*\})'", TEXT)]
    assert {key for body in bodies for key in body["server_args"]} == HANDLERS
    assert all(body.keys() == {"server_args"} for body in bodies)


def test_links_and_files_exist() -> None:
    assert [link for link in LOCAL if not (PAGE.parent / link).exists()] == []
    files = re.findall(r"`((?:docs|scripts|tests|zos_sglang)/[\w./-]+)`", TEXT)
    assert files and [name for name in files if not (ROOT / name).exists()] == []
    assert "(docs/observability.md)" in README


def test_pictures_are_small_and_all_shown() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    there = set((ROOT / "docs" / "images").iterdir())
    assert shown == there
    for path in there:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 150_000, path


def test_the_accuracy_is_that_of_the_results() -> None:
    found = json.loads((ROOT / "bench" / "results" / "h200_model.json").read_text())
    lines, told = found["lines"], " ".join(TEXT.split())
    within = sum(line["within"] for line in lines)
    assert f"of {len(lines)} step times" in told and f"{within} are within 5 %" in told
    for words, mode in (("lane", "resident"), ("without overlap", "sync"), ("overlap", "overlap")):
        one = found["summary"][mode]
        assert f"{words} {one['within']} of {one['settings']}" in told
    missed = [line for line in lines if not line["within"]]
    wholly = [line for line in missed if not line["cause"].startswith("in part")]
    assert (len(missed), len(wholly)) == (10, 9)
    ratios = [line["cpu_ratio"] for line in wholly]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times the CPU" in told
    worst = [abs(line["error"]) * 100 for line in missed]
    assert f"{min(worst):.0f} to {max(worst):.0f} %" in told
    own = [abs(line["own_cpu_error"]) for line in lines if line["own_cpu_error"] is not None]
    assert f"all {len(own)} are within {100 * max(own):.1f} %" in told


def test_the_script_of_the_pictures_asks_for_panels_and_modes_that_there_are() -> None:
    place = ROOT / "scripts" / "make_docs_images.py"
    spec = importlib.util.spec_from_file_location("make_docs_images", place)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    dashboard = json.loads((ROOT / "docs" / "grafana" / "zos-sglang.json").read_text())
    assert set(script.PANELS) <= {panel["title"] for panel in dashboard["panels"]}
    assert set(script.MODES) <= doctor_server.MODES.keys()
    assert f"{script.PACE.us / 1000:.0f} ms" in TEXT
