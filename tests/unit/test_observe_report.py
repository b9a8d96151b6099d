"""The report of a trace: its numbers, its page in a real browser, and what it says to bad input."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from tests.browser import opened, rows_of_colour
from tests.fuzz.hostile import MARKUP
from tests.unit.made_records import records, steady
from tests.unit.trace_case import traced
from zos_sglang import __version__
from zos_sglang.__main__ import main
from zos_sglang.observe.names import COLUMNS, LANE_OPENING, Work
from zos_sglang.observe.record import TIMES
from zos_sglang.observe.signs import Delivery, Sign, Verdict, judge
from zos_sglang.observe.summary import summarise
from zos_sglang.observe.tools import report_data as data
from zos_sglang.observe.tools import report_page, report_words
from zos_sglang.observe.trace_reader import read
from zos_sglang.observe.trace_sink import TraceSink


def shifted(found: np.ndarray, steps: int, nanoseconds: int) -> np.ndarray:
    """The same records later."""
    found["step"] += steps
    for name in TIMES:
        found[name] += nanoseconds
    return found


def mixed() -> np.ndarray:
    """600 steps with overlap, a few held back and blocked, then 400 of the lane."""
    loop = steady(600, gpu=1.4, cpu=0.7)
    loop["gpu"][np.arange(600) % 16 > 1] = loop["d2h"][np.arange(600) % 16 > 1] = -1
    for name, word in (("reason", "first-token"), ("path", "sync")):
        loop[name][::50] = COLUMNS[name].index(word) + 1
    loop["block"][100:110], loop["blocked"][100:110] = COLUMNS["block"].index("copy") + 1, 90_000
    loop["path"][100:110] = COLUMNS["path"].index("overlap-blocked") + 1
    lane = steady(400, gpu=1.3, cpu=0.4, path="resident", mode="resident")
    lane["flags"][0] = LANE_OPENING
    lane["departure"][200] = COLUMNS["departure"].index("finish") + 1
    return np.concatenate([loop, shifted(lane, 600, int(loop["t_output"][-1] - lane["t_intake"][0]))])


def report(trace: Path, *more: str | Path) -> int:
    return main(["report", str(trace), *map(str, more)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.json"
    traced(path, mixed())
    return path


def test_the_numbers_are_those_of_the_records(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(trace, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"] == json.loads(json.dumps(summarise(mixed())))
    assert [one["verdict"] for one in found["signs"]] == [str(one.verdict) for one in judge(mixed())]
    assert (found["ended"], found["notes"], found["facts"]["asynchronous"]) == (True, [], True)
    assert not Path("report.html").exists()


def test_a_page_and_the_numbers_at_once(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = trace.with_suffix(".html")
    assert report(trace, "--json", "-o", page) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["steps"] == 1000
    assert page.read_text().startswith("<!doctype html>")


def test_the_page_is_named_and_sized_on_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    assert report(trace) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(r"report\.html: 1000 steps of \d\.\d s\n", shown.out)
    assert (trace.parent / "report.html").exists()
    assert shown.err == ""


def test_the_page_loads_nothing_and_may_not(trace: Path) -> None:
    page = trace.with_suffix(".html")
    report(trace, "-o", page)
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?://|@import|url\(|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text


def test_words_of_a_trace_are_text_on_the_page(tmp_path: Path) -> None:
    path, page = tmp_path / "<i>.json", tmp_path / "p.html"
    sink = TraceSink(path, 10**8, {"asynchronous": True, "mode": "</script><script>alert(1)"}, "scheduler 0")
    sink(mixed())
    sink.close()
    report(path, "-o", page)
    text = page.read_text()
    assert "<script>alert" not in text
    assert "<i>.json" not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text


def test_a_browser_runs_and_loads_nothing_that_a_trace_says(tmp_path: Path) -> None:
    """Facts, process, version, the file's name and damaged lines: all of it is somebody else's text."""
    facts = {"asynchronous": True, **{f"{word}{n}": {word: word} for n, word in enumerate(MARKUP)}}
    path, page = tmp_path / f"{MARKUP[2].replace('/', '')}.json", tmp_path / "p.html"
    sink = TraceSink(path, 10**8, facts, MARKUP[0])
    sink(mixed())
    sink.close()
    path.write_text(path.read_text().replace(f'"version": "{__version__}"', f'"version": "{MARKUP[0]}"'))
    report(path, "-o", page)
    plain = tmp_path / "plain.html"
    traced(tmp_path / "plain.json", mixed())
    report(tmp_path / "plain.json", "-o", plain)
    with opened(page) as seen:
        assert seen.complaints == []
        assert seen.requests == [page.as_uri()]
        assert [word for word in MARKUP if word not in seen.page.inner_text("header")] == []
        elements = seen.page.evaluate(_ELEMENTS)
    with opened(plain) as seen:
        assert seen.page.evaluate(_ELEMENTS) == elements


#: How many elements of each kind there are.
_ELEMENTS = """() => [...document.querySelectorAll('*')]
    .reduce((found, one) => ({...found, [one.tagName]: (found[one.tagName] || 0) + 1}), {})"""


def test_everything_that_can_stand_in_a_record_is_explained() -> None:
    assert report_words.REASONS.keys() == set(map(str, COLUMNS["reason"]))
    assert report_words.BLOCKS.keys() == set(map(str, COLUMNS["block"]))
    assert report_words.DEPARTURES.keys() == set(map(str, COLUMNS["departure"]))
    assert report_words.PATHS.keys() == {*map(str, COLUMNS["path"]), "nothing-pending"}
    assert report_words.WORKS.keys() == report_page.WORK_COLOURS.keys() == {*map(str, Work), "forward"}
    assert report_words.SIGNS.keys() == set(map(str, Sign))
    assert report_words.VERDICTS.keys() == set(map(str, Verdict))
    assert report_words.DELIVERIES.keys() == set(map(str, Delivery))
    assert report_page.PATH_COLOURS.keys() == set(map(str, COLUMNS["path"]))


def test_a_browser_draws_the_tracks_one_below_the_other(trace: Path) -> None:
    page = trace.with_suffix(".html")
    report(trace, "-o", page)
    with opened(page) as seen:
        assert seen.complaints == []
        assert seen.requests == [page.as_uri()]
        picture = seen.picture("#timeline")
        lines = [rows_of_colour(picture, colour) for colour in report_page.COLOURS.values()]
        # The copies are short: a few pixels each.
        assert [len(one) > 50 for one in lines] == [True] * 4
        assert [mean(one) for one in lines] == sorted(mean(one) for one in lines)
        for above, below in pairwise(lines):
            assert max(above) < min(below)
        strip = seen.picture("#overview")
        assert all(rows_of_colour(strip, report_page.PATH_COLOURS[path]) for path in ("overlap", "resident"))


def test_a_browser_zooms_moves_and_tells_of_a_step(trace: Path) -> None:
    page = trace.with_suffix(".html")
    report(trace, "-o", page)
    with opened(page) as seen:
        canvas = seen.page.locator("#timeline")
        box = canvas.bounding_box()

        def view() -> tuple[float, float]:
            low, high = canvas.evaluate("canvas => canvas.zos().view")
            return low, high

        low, high = view()
        seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 150)
        seen.page.mouse.wheel(0, -400)
        seen.page.wait_for_function(f"document.getElementById('timeline').zos().view[0] > {low}")
        nearer = view()
        assert low < nearer[0] < nearer[1] < high
        canvas.press("ArrowRight")
        assert view()[0] > nearer[0]
        seen.page.click("#all")
        everything = view()
        assert everything[0] < low
        assert everything[1] > high
        seen.page.click("#closer")
        assert view()[1] - view()[0] < everything[1] - everything[0]
        # Back to where slices are wide, and point at a forward.
        seen.page.reload()
        seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 122)
        tip = seen.page.locator("#tip")
        tip.wait_for(state="visible")
        assert re.match(r"step \d+: decode, 4 requests\nforward 1\.\d\d ms\npath ", tip.inner_text())
        assert canvas.evaluate("canvas => canvas.zos().hovered") >= 0
        assert seen.complaints == []


def test_a_browser_shows_the_tables(trace: Path) -> None:
    page = trace.with_suffix(".html")
    report(trace, "-o", page)
    with opened(page) as seen:
        reasons = {row[0]: row[1:] for row in seen.cells("reasons")}
        assert reasons.keys() == {"overlapped", "first-token"}
        assert reasons["overlapped"][:2] == ["988", "98.8 %"]
        assert reasons["first-token"][:2] == ["12", "1.2 %"]
        assert [row[0] for row in seen.cells("signs")] == [title for title, _ in report_words.SIGNS.values()]
        assert [row[:2] for row in seen.cells("blocks")] == [["copy", "10"]]
        assert seen.cells("blocks")[0][3] == "90 µs"
        assert seen.cells("departures") == [["finish", "1", "0.1 %"]]
        assert len(seen.cells("distributions")) == seen.page.locator("figure svg").count() == 5
        assert {row[0] for row in seen.cells("cpu")} == set(map(str, Work))


def test_what_a_reason_costs_is_on_the_page(tmp_path: Path) -> None:
    """Steps that a guard holds back, twice as long as those that overlap."""
    made = np.concatenate(
        [
            steady(100, gpu=2, cpu=1),
            shifted(
                steady(100, gpu=2, cpu=1, d2h=1, overlap=False, mode="overlap", reason="grammar-sync"),
                *(100, 10**9),
            ),
        ]
    )
    traced(tmp_path / "t.json", made)
    report(tmp_path / "t.json", "-o", tmp_path / "p.html")
    row = re.search(r"<td class=\"\">grammar-sync.*?</tr>", (tmp_path / "p.html").read_text())
    assert row is not None
    (cost,) = (one["cost_us"] for one in summarise(made)["reasons"])
    assert cost == pytest.approx(2000, rel=0.1)
    assert row[0].endswith(f'<td class="num">+{cost:,.0f}</td></tr>')


def test_a_trace_without_steps_is_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced(tmp_path / "t.json", records(0))
    assert report(tmp_path / "t.json", "-o", tmp_path / "p.html") == 0
    assert "holds no steps" in (tmp_path / "p.html").read_text()
    assert ": 0 steps" in capsys.readouterr().out
    assert report(tmp_path / "t.json", "--json") == 0


@pytest.mark.parametrize(
    "made", [steady(1, gpu=2, cpu=1), records(3)], ids=["one step", "steps without times"]
)
def test_a_browser_bears_traces_of_next_to_nothing(tmp_path: Path, made: np.ndarray) -> None:
    traced(tmp_path / "t.json", made)
    assert report(tmp_path / "t.json", "-o", tmp_path / "p.html") == 0
    with opened(tmp_path / "p.html") as seen:
        assert seen.complaints == []
        assert seen.cells("reasons")[0][0] == "overlapped"


def test_a_long_trace_shows_the_last_steps_and_counts_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced(tmp_path / "t.json", steady(120, gpu=2, cpu=1))
    found = read(tmp_path / "t.json")
    monkeypatch.setattr(data, "SHOWN", 100)
    drawn = data.timeline(found)
    assert drawn["step"] == list(range(21, 121))
    assert {len(slices) for slices in drawn["tracks"].values()} == {100}
    assert report(tmp_path / "t.json", "-o", tmp_path / "p.html") == 0
    assert "shows the last 100 of 120 steps" in (tmp_path / "p.html").read_text()


def test_a_trace_that_is_cut_off_is_reported_with_a_note(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut, page = trace.with_name("cut.json"), trace.with_suffix(".html")
    cut.write_bytes(trace.read_bytes()[:300_000])
    assert report(cut, "-o", page) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "cut off at its end; everything before was recovered" in shown.err
    assert "cut off at its end" in page.read_text()
    assert "was not closed" in page.read_text()
    assert 100 < int(re.search(r": (\d+) steps", shown.out)[1]) < 1000  # type: ignore[index]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b"not a trace", "no JSON"),
        (b'[{"name":"other","ph":"X","ts":1}]', "not a trace of zos-sglang"),
        (b'[\n{"name', "not a trace of zos-sglang"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, complaint: str
) -> None:
    path, page = tmp_path / "t.json", tmp_path / "p.html"
    if content is not None:
        path.write_bytes(content)
    assert report(path, "-o", page) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"zos-sglang: error: {path}: ")
    assert complaint in shown.err
    assert shown.err.count("\n") == 1
    assert not page.exists()


def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    for output in (trace.parent / "missing" / "p.html", trace.parent, trace, Path("/proc/version")):
        assert report(trace, "-o", output) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith(f"zos-sglang: error: {output}: ")
        assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert trace.read_bytes() == before


def test_a_file_that_may_not_be_read_is_one_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(trace.parent) == 2
    assert "Is a directory" in capsys.readouterr().err
    if os.geteuid() != 0:
        trace.chmod(0)
        assert report(trace) == 2
        assert "Permission denied" in capsys.readouterr().err
