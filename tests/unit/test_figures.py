"""Numbers of the README and of the pages are in result files; and a wrong one would be found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.testing.docs.blocks import Block, blocks
from zos_sglang.testing.docs.figures import check, figures, problems
from zos_sglang.testing.docs.selection import SelectionError, select

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]

ROWS = [
    {"batch": 1, "mode": "stock", "step_us": 2000.4, "ratio": 1.0},
    {"batch": 1, "mode": "ours", "step_us": 1480.2, "ratio": 1.4249},
    {"batch": 16, "mode": "stock", "step_us": 2700.0, "ratio": 1.0},
    {"batch": 16, "mode": "ours", "step_us": 1500.0, "ratio": 1.6},
]


# ------------------------------------------------------------------ the pages


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_the_page_is_in_the_file_that_it_names(page: str) -> None:
    assert check(ROOT / page, RESULTS) == []


def test_a_readme_with_any_one_figure_changed_is_refused() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    changed = [one for block in blocks(text) if block.results for one in with_one_changed(block)]
    assert len(changed) > 60
    assert [block.lines for block in changed if not list(problems(block, RESULTS))] == []


def with_one_changed(block: Block) -> Iterator[Block]:
    """The block once for each figure in it, with another last digit."""
    first = 2 if block.is_table else 0
    for number, line in enumerate(block.lines[first:], first):
        hidden = re.sub(r"\([^)]*\.json\)|`[^`]*`", lambda found: "`" * len(found.group()), line)
        for found in re.finditer(r"(?<![\w.,-])\d[\d,]*\.\d+(?![\w.])", hidden):
            other = found.group()[:-1] + str((int(found.group()[-1]) + 3) % 10)
            lines = list(block.lines)
            lines[number] = line[: found.start()] + other + line[found.end() :]
            yield replace(block, lines=lines)


# ------------------------------------------------------------------ the checker


@pytest.fixture
def results(tmp_path: Path) -> Path:
    found: dict[str, Any] = {
        "commit": "12345",
        "requests": 1037,
        "share": 0.9537,
        "flat": 97.0,
        "took": "5 min 9 s",
        "changes": [-0.07, 0.05],
        "rows": ROWS,
        "raw": [7.77],
    }
    (tmp_path / "run.json").write_text(json.dumps(found))
    (tmp_path / "other.json").write_text(json.dumps({"rows": [{"batch": 1, "ratio": 3.21}]}))
    return tmp_path


def complaints(text: str, results: Path) -> list[str]:
    page = results / "page.md"
    page.write_text(text)
    return check(page, results)


@pytest.mark.parametrize(
    "text",
    [
        "1,037 requests, 95.4 % of them",
        "a step of 2.0 ms, or 2,000 µs",
        "42.5 % faster; a ratio of 1.42 and of 1.425",
        "SGLang 0.5.23 on a 0.6B model, Python 3.11, P99 of batch 16",
        "it took 5 min 9 s",
    ],
)
def test_a_number_of_the_file_passes_in_another_unit_or_rounded(text: str, results: Path) -> None:
    assert complaints(f"<!-- results: run.json -->\n\n{text}\n", results) == []


@pytest.mark.parametrize("wrong", ["1,038", "95.5 %", "2.1 ms", "1.426", "7.77", "12345", "6 min"])
def test_a_number_that_is_not_in_the_file_is_named(wrong: str, results: Path) -> None:
    (found,) = complaints(f"<!-- results: run.json -->\n\nfigure {wrong} here\n", results)
    assert found.startswith(f"page.md:3: {wrong}") and "in none of the named results" in found


@pytest.mark.parametrize("figure", ["1.425", "1,037", "12 ms", "95 %", "20 to 80 ms", "300 requests"])
def test_what_looks_like_a_measurement_needs_a_source(figure: str, results: Path) -> None:
    found = complaints(f"We saw {figure} there.\n", results)
    assert found and all("names its result file" in one for one in found)


def test_other_numbers_code_links_and_fenced_text_need_none(results: Path) -> None:
    text = "Two of 3, see [this page](a/6.7.md), `--rate 8.9`:\n\n    run --for 10.5 s\n\n```\n11.5 ms\n```\n"
    assert complaints(text, results) == []


def test_a_comment_governs_the_next_block_only(results: Path) -> None:
    text = "<!-- results: run.json -->\n\nshare 0.9537\n\nshare 0.9537\n"
    (found,) = complaints(text, results)
    assert found.startswith("page.md:5:")


def test_an_aim_is_named_as_one(results: Path) -> None:
    aim = "<!-- not measured: 1.05 what we aimed at -->\n\nat most 1.05"
    assert complaints(aim + "\n", results) == []
    assert len(complaints(aim + " and 1.06\n", results)) == 1


TABLE = """<!-- results: run.json; step ms: rows[batch={batch} mode=ours]/step_us; over: @over -->
<!-- define unused: rows -->

| batch | step ms | over |
|---|---|---|
| 1 | 1.480 | 1.425 |
| 16 | 1.500 | 1.600 |
"""
DEFINE = "<!-- define over:\nrows[batch={batch} mode=ours]/ratio -->\n"


def test_a_row_of_a_table_is_held_against_its_own_records(results: Path) -> None:
    assert complaints(DEFINE + TABLE, results) == []
    swapped = TABLE.replace("1.480", "x").replace("1.500", "1.480").replace("x", "1.500")
    found = complaints(DEFINE + swapped, results)
    assert ["row 1 1.500 1.425, step ms" in found[0], "row 16 1.480 1.600, step ms" in found[1]] == [True] * 2


def test_a_column_is_held_against_its_own_term(results: Path) -> None:
    (found,) = complaints(DEFINE + TABLE.replace("1.425", "1.480"), results)
    assert "over: 1.480" in found


def test_a_row_without_a_record_is_refused(results: Path) -> None:
    (found,) = complaints(DEFINE + TABLE.replace("| 16 |", "| 17 |"), results)
    assert "picks no number" in found


def test_a_row_may_name_its_file(results: Path) -> None:
    table = (
        "<!-- results: {file@}; over: rows[batch={batch}]/ratio -->\n\n"
        "| batch | over | file |\n|---|---|---|\n| 1 | 3.21 | [there](x/other.json) |\n"
    )
    assert complaints(table, results) == []
    assert len(complaints(table.replace("3.21", "3.22"), results)) == 1


@pytest.mark.parametrize(
    ("comment", "why"),
    [
        ("none.json", "none.json"),
        ("run.json nowhere", "picks no number"),
        ("run.json median(rows)", "no function median"),
        ("run.json rows over flat", "one number is wanted"),
    ],
)
def test_a_comment_that_picks_nothing_is_refused(comment: str, why: str, results: Path) -> None:
    (found,) = complaints(f"<!-- results: {comment} -->\n\nflat 97.0\n", results)
    assert why in found


def test_a_comment_with_nothing_behind_it_is_refused(results: Path) -> None:
    assert complaints("Text.\n\n<!-- results: run.json flat -->\n", results) != []


# ------------------------------------------------------------------ the language of the comments


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ("requests", [1037]),
        ("rows[batch=16 mode=ours]/ratio", [1.6]),
        ("rows[mode=stock]/step_us", [2000.4, 2700]),
        ("rows[batch=1 mode=ours]", [1, 1480.2, 1.4249]),
        ("rows[batch=16 mode=stock]/step_us over rows[batch=16 mode=ours]/step_us", [1.8]),
        ("rows[batch=16 mode=stock]/step_us minus rows[batch=16 mode=ours]/step_us", [1200]),
        ("sum(rows/*/batch)", [34]),
        ("max(rows[mode=ours]/ratio)", [1.6]),
        ("geomean(rows[mode=stock]/ratio)", [1]),
        ("took", [5, 9]),
        ("abs(changes)", [0.07, 0.05]),
        ("raw", [7.77]),
    ],
)
def test_a_place_picks_its_numbers(wanted: str, numbers: list[float], results: Path) -> None:
    assert [value.number for value in select(wanted, "run.json", results)] == pytest.approx(numbers)


def test_samples_and_provenance_prove_nothing_by_themselves(results: Path) -> None:
    found = {value.number for value in select("", "run.json", results)}
    assert {1037, 0.9537, 97, 2700} <= found and not {7.77, 12345} & found


def test_a_place_that_is_not_there_is_an_error(results: Path) -> None:
    with pytest.raises(SelectionError, match="picks no number"):
        select("rows[batch=2]", "run.json", results)


def test_units_behind_numbers_are_read() -> None:
    found = [(one.text, one.unit) for one in figures("1.5 ms, 20 to 80 %, 4,096-token prompts, batch 16")]
    assert found == [("1.5", "ms"), ("20", "%"), ("80", "%"), ("4,096", "token"), ("16", "")]
