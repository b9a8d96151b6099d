"""docs/distributed.md quotes flags, metrics, fields and log lines: each of them exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import zos_sglang
from zos_sglang.launch_server import full_parser
from zos_sglang.observe.metric_families import FAMILIES
from zos_sglang.overlap.account import PATHS
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.settings import Settings, env_name

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed.md"
TEXT = PAGE.read_text(encoding="utf-8")
TABLE = [line.split("|")[1:-1] for line in TEXT.splitlines() if line.startswith("| ")]
#: What stands in a metric's name here and is none.
OTHERS = {"zos_sglang"}
FAMILY = {family.name: family for family in FAMILIES}


@cache
def words_of(source: Path) -> str:
    """Every piece of text in a module, literals that Python joins already joined, one a line."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(text for text in found if isinstance(text, str))


def our_words() -> str:
    places = Path(zos_sglang.__file__).parent
    return "\n".join(
        words_of(path) for part in ("upstream", "overlap") for path in (places / part).glob("*.py")
    )


def sglangs_words() -> str:
    from sglang.srt.managers import scheduler

    return words_of(Path(scheduler.__file__))


QUOTED = re.findall(r'`"(.+?)"`', TEXT)


def test_log_lines_are_quoted() -> None:
    assert len(QUOTED) > 10


@pytest.mark.parametrize("line", sorted(set(QUOTED)))
def test_every_quoted_log_line_is_in_the_code(line: str) -> None:
    words = our_words() + sglangs_words()
    pieces = [piece.strip() for piece in line.split("…") if piece.strip()]
    assert pieces and [piece for piece in pieces if piece not in words] == []


def test_every_metric_exists_with_its_label() -> None:
    quoted = re.findall(r'\b(zos_[a-z_]+)(?:\{(\w+)="([\w-]+)"\})?', TEXT)
    assert len(quoted) > 10
    for name, label, value in quoted:
        if name not in OTHERS:
            assert name in FAMILY, name
            assert not label or value in FAMILY[name].labels[label], (name, label, value)


def test_a_label_without_its_metric_is_one_of_the_metric_before() -> None:
    alone = re.findall(r'`\{(\w+)="([\w-]+)"\}`', TEXT)
    assert alone == [("reason", "first-token")]
    assert "first-token" in FAMILY["zos_steps_not_overlapped_total"].labels["reason"]


def test_every_variable_and_flag_exists() -> None:
    assert set(re.findall(r"\bZOS_[A-Z_]+\b", TEXT)) <= {env_name(field) for field in Settings.model_fields}
    known = {flag for action in full_parser()._actions for flag in action.option_strings}
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert len(flags) > 10 and flags - known == set()


def test_every_count_of_paths_and_field_exists() -> None:
    counts = re.findall(r"[Cc]ount `([\w-]+)`", TEXT) + re.findall(r"`(barrier-\w+)`", TEXT)
    assert len(counts) > 6 and set(counts) <= set(PATHS)
    report = words_of(Path(zos_sglang.__file__).parent / "upstream" / "runtime.py").splitlines()
    from zos_sglang.overlap import account

    report += words_of(Path(account.__file__)).splitlines()
    fields = re.findall(r"[Ff]ield `(\w+)`", TEXT)
    assert len(fields) > 2 and set(fields) <= set(report)


def test_every_refusal_of_the_table_is_one_of_the_lane() -> None:
    named = [word for row in TABLE for word in re.findall(r"`([\w-]+)`", row[3])]
    assert len(named) > 4 and set(named) <= set(Refusal)


@pytest.mark.parametrize(
    "choice",
    [
        *("tensor parallelism", "DP attention with EP", "chunked prefill", "mixed chunk", "MTP, EAGLE"),
        *("structured output", "disaggregation", "confidential computing", "pipeline parallelism", "MLX"),
        *("PD multiplexing", "diffusion LLM", "NGRAM"),
    ],
)
def test_every_deployment_choice_has_its_row_and_its_paragraph(choice: str) -> None:
    rows = [row for row in TABLE if row[0].strip().startswith(choice)]
    assert len(rows) == 1 and all(cell.strip() for cell in rows[0])
    below = TEXT.partition("\n## ")[2].lower()
    assert re.split(r" with |,", choice)[0].lower() in below or f"{choice}.md" in TEXT


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", TEXT) if "://" not in link]
    assert set(links) == {"dp-attention.md", "disaggregation.md", "observability.md"}
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
