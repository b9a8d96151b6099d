"""What pages name is there: links, files, make targets, commands, packages with what they import."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from zos_sglang.cli import _parser
from zos_sglang.modes import MODES
from zos_sglang.overlap.guards import Reason
from zos_sglang.resident.eligibility import Departure, Refusal
from zos_sglang.settings import Settings, env_name

ROOT = Path(__file__).parents[2]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "bench/README.md", "bench/NOTES.md", "patches/README.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))),
]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/how-it-works.md", "docs/modes.md"])
def test_every_file_command_and_variable_that_a_page_names_exists(page: str) -> None:
    text = text_of(page)
    files = re.findall(r"(?<![\w/.-])((?:docs|scripts|tests|zos_sglang|patches|bench)/[\w./-]*\w)", text)
    assert [name for name in files if "*" not in name and not (ROOT / name).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.M)) <= targets
    assert set(re.findall(r"\bZOS_[A-Z_]+\b", text)) <= {env_name(field) for field in Settings.model_fields}
    for command in re.findall(r"python -m zos_sglang ([^`#>\n]*)", text):
        words = shlex.split(re.sub(r"\[.*?\]|--help", "", command))
        args, rest = _parser().parse_known_args(words)
        assert not rest or args.command == "doctor", command


def test_the_page_of_modes_has_every_mode_and_every_reason() -> None:
    text = text_of("docs/modes.md")
    assert [mode for mode in MODES if f"| `{mode}` |" not in text or f"- **`{mode}`**" not in text] == []
    assert [reason for reason in Reason if f"`{reason}`" not in text] == []


def test_the_page_of_the_lane_has_every_refusal_and_departure() -> None:
    # That a batch is no decode batch is not counted, so nobody sees it.
    words = [word for word in (*Refusal, *Departure) if word is not Refusal.NOT_DECODE]
    assert [word for word in words if f"`{word}`" not in text_of("docs/lane.md")] == []


def test_every_statement_about_another_engine_has_an_address() -> None:
    section = text_of("docs/modes.md").partition("## What other engines do")[2]
    parts = re.split(r"^### ", section, flags=re.M)[1:]
    assert len(parts) == 3
    assert [part.splitlines()[0] for part in parts if "https://github.com/" not in part] == []


# ------------------------------------------------------------------ the architecture


def imported(package: Path) -> set[str]:
    """Top names of all modules that a package imports, also inside functions."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found


def test_packages_import_what_contributing_says_they_may() -> None:
    rows = re.findall(r"^\| `(zos_sglang/\w+)` \| .* \| (.*) \|$", text_of("CONTRIBUTING.md"), re.M)
    there = {f"zos_sglang/{path.parent.name}" for path in (ROOT / "zos_sglang").glob("*/__init__.py")}
    assert {name for name, _ in rows} == there
    for name, words in rows:
        names = imported(ROOT / name)
        if words == "neither torch nor SGLang":
            assert not names & {"torch", "sglang"}, name
        elif words == "torch, not SGLang":
            assert "sglang" not in names, name
        else:
            assert words == "everything"
