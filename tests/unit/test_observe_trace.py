"""Records as trace events and back: tracks, arrows, instants, and traces that are damaged."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.made_records import MS, records, steady
from tests.unit.trace_case import check_well_formed, instants, on, traced
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.names import COLUMNS, LANE_OPENING
from zos_sglang.observe.record import DURATIONS, STEP, TIMES
from zos_sglang.observe.trace_events import META
from zos_sglang.observe.trace_reader import read
from zos_sglang.observe.trace_sink import TraceSink, file_of, make_trace
from zos_sglang.observe.trace_tracks import TRACKS, Tracks, rows_of
from zos_sglang.settings import Settings


def test_a_step_is_one_slice_a_track_with_an_arrow(tmp_path: Path) -> None:
    events = traced(tmp_path / "t.json", steady(50, gpu=2, cpu=1))
    assert Counter(TRACKS[e["tid"] - 1] for e in events if e["ph"] == "X") == dict.fromkeys(TRACKS, 50)
    check_well_formed(events)
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == dict(enumerate(TRACKS, 1))
    assert {e["pid"] for e in events} == {events[0]["pid"]}


def test_the_records_come_back_as_they_were(tmp_path: Path) -> None:
    made = steady(20, gpu=2, cpu=1, departure=["intake", *[0] * 18, "finish"], refusal="grammar")
    traced(tmp_path / "t.json", made)
    found = read(tmp_path / "t.json")
    assert np.array_equal(found.records, made)
    assert (found.notes, found.ended, found.asynchronous) == ([], True, True)
    assert found.meta["facts"]["mode"] == "overlap"


def test_sampled_steps_have_their_measured_length_and_others_are_marked(tmp_path: Path) -> None:
    made = steady(32, gpu=2, cpu=1, d2h=0.1)
    sampled = np.isin(np.arange(32) % 16, (0, 1))
    made["gpu"][~sampled] = made["d2h"][~sampled] = -1
    slices = on(traced(tmp_path / "t.json", made), "forward")
    for one, known in zip(slices, sampled, strict=True):
        assert one["args"]["from"] == ("events" if known else "estimated")
        assert one["args"].get("estimated", False) is not known
        # Whole steps that wait for the device: an estimate is right there too.
        assert one["dur"] == pytest.approx(2000, abs=1)


def test_a_result_that_nobody_waited_for_is_not_drawn_longer_than_the_last_sample() -> None:
    made = steady(8, gpu=1, cpu=4, ready=["at-launch"] * 8)
    made["t_ready"] += 2 * MS  # seen late
    made["gpu"][1:] = made["d2h"][1:] = -1
    tracks = Tracks(asynchronous=True)
    lengths = [
        placed.forward[1] - placed.forward[0] for placed in map(tracks.place, rows_of(made)) if placed.forward
    ]
    assert lengths == [MS] * 8


def test_on_a_device_that_is_not_asynchronous_the_forward_is_the_call(tmp_path: Path) -> None:
    made = steady(10, gpu=2, cpu=1)
    made["t_ready"] = made["t_forward"] + 100_000
    made["gpu"] = made["d2h"] = made["cpu_depends"] = made["wait"] = -1
    events = traced(tmp_path / "t.json", made, asynchronous=False)
    slices = on(events, "forward")
    assert {one["args"]["from"] for one in slices} == {"call"}
    assert [one["dur"] for one in slices] == pytest.approx([100.0] * 10)
    # What is not known is not a number.
    assert on(events, "schedule")[0]["args"]["depends_us"] is None
    assert on(events, "processing")[0]["args"]["wait_us"] is None


def test_without_overlap_scheduling_does_not_seem_to_run_beside_the_forward_it_waits_for(
    tmp_path: Path,
) -> None:
    """The loop waits for the result before in the middle of an iteration; the slice begins after that."""
    made = steady(10, gpu=4, cpu=2, overlap=False)
    # Iteration N holds: intake, processing of N-1 with its wait, launch.
    made["t_intake"][1:] = made["t_process"][:-1] - 1000
    made["t_launch"][1:] = made["t_output"][:-1] + 1000
    made["t_forward"] = made["t_launch"] + 1000
    made["t_launched"] = made["t_launch"] + MS // 2
    made["t_ready"] = made["t_forward"] + 4 * MS
    made["t_process"] = made["t_launched"] + 2000
    made["t_output"] = made["t_ready"] + MS // 2
    made["t_intake"][1:] = made["t_process"][:-1] - 1000
    made["t_launch"][1:] = made["t_output"][:-1] + 1000
    events = traced(tmp_path / "t.json", made)
    check_well_formed(events)
    processed = {e["args"]["step"]: e["ts"] + e["dur"] for e in on(events, "processing")}
    for one in on(events, "schedule")[1:]:
        assert one["ts"] >= processed[one["args"]["step"] - 1] - 0.001


def test_a_result_that_nobody_processed_has_no_slice_and_no_arrow(tmp_path: Path) -> None:
    made = steady(4, gpu=2, cpu=1)
    for name in ("t_process", "t_ready", "t_output"):
        made[name][2] = 0
    made["gpu"][2] = made["wait"][2] = -1
    events = traced(tmp_path / "t.json", made)
    check_well_formed(events)
    assert [e["args"]["step"] for e in on(events, "processing")] == [1, 2, 4]
    assert [e["args"]["step"] for e in on(events, "forward")] == [1, 2, 4]
    assert [e["args"]["step"] for e in on(events, "schedule")] == [1, 2, 3, 4]


def test_decisions_and_changes_of_the_lane_are_instants(tmp_path: Path) -> None:
    made = records(
        9,
        mode=["overlap"] * 7 + ["sync"] * 2,
        reason=[
            *("nothing-pending", "overlapped", "overlapped", "first-token", "first-token", "overlapped"),
            *("overlapped", "mode-sync", "mode-sync"),
        ],
        refusal=[0, "grammar", "grammar", 0, 0, 0, 0, 0, 0],
        departure=[0, 0, 0, 0, 0, 0, "finish", 0, 0],
        flags=[0, 0, 0, 0, 0, LANE_OPENING, 0, 0, 0],
    )
    for name in TIMES:
        made[name] = np.arange(1, 10) * MS
    assert instants(traced(tmp_path / "t.json", made)) == [
        *("mode overlap", "launch: overlapped", "lane refused: grammar"),
        *("held back: first-token", "held back: first-token", "launch: overlapped", "lane opens"),
        *("lane left: finish", "mode sync", "launch: mode-sync"),
    ]


def test_what_was_written_is_not_written_again(tmp_path: Path) -> None:
    made = steady(20, gpu=2, cpu=1)
    sink = TraceSink(tmp_path / "t.json", 10**8, {}, "scheduler 0")
    sink(made[:12])
    sink(made[8:])
    sink(made[:0])
    sink.close()
    sink(steady(40, gpu=2, cpu=1)[20:])
    sink.close()
    assert read(tmp_path / "t.json").records["step"].tolist() == list(range(1, 21))


ANY_TIME = st.integers(0, 10**6)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), asynchronous=st.booleans())
def test_no_record_makes_slices_that_overlap(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, asynchronous: bool
) -> None:
    """Whatever stands in a record, even times that run backwards: a viewer opens the file."""
    count = data.draw(st.integers(1, 12))
    made = records(count)
    for name in TIMES:
        made[name] = data.draw(st.lists(ANY_TIME, min_size=count, max_size=count))
    for name in DURATIONS:
        made[name] = data.draw(st.lists(st.integers(-1, 10**6), min_size=count, max_size=count))
    for name, words in COLUMNS.items():
        made[name] = data.draw(st.lists(st.integers(0, len(words)), min_size=count, max_size=count))
    path = tmp_path_factory.mktemp("any") / "t.json"
    check_well_formed(traced(path, made, asynchronous))
    assert np.array_equal(read(path).records, made)


def test_a_trace_cut_anywhere_gives_the_steps_before_the_cut(tmp_path: Path) -> None:
    made = steady(6, gpu=2, cpu=1)
    path, cut = tmp_path / "t.json", tmp_path / "cut.json"
    traced(path, made)
    whole = path.read_bytes()
    begin = whole.index(b"\n", whole.index(META.encode())) - 1
    seen = []
    for end in range(begin, len(whole) - 2, 7):
        cut.write_bytes(whole[:end])
        found = read(cut)
        assert np.array_equal(found.records, made[: len(found.records)])
        assert any("cut off" in note for note in found.notes)
        assert not any("damaged" in note for note in found.notes)
        seen.append(len(found.records))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 6)


def test_a_damaged_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    traced(path, steady(6, gpu=2, cpu=1))
    lines = path.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if '"step":3,' in line)
    lines[place] = lines[place][:100]
    path.write_text("\n".join(lines))
    found = read(path)
    assert found.records["step"].tolist() == [1, 2, 4, 5, 6]
    assert found.notes == [
        "1 damaged lines of the trace were left out",
        "1 steps are missing between the first and the last",
    ]


def test_events_that_another_program_has_saved_are_read(tmp_path: Path) -> None:
    made = steady(6, gpu=2, cpu=1)
    events = traced(tmp_path / "t.json", made)
    for content in (json.dumps(events), json.dumps({"traceEvents": events}), json.dumps(events, indent=1)):
        path = tmp_path / "again.json"
        path.write_text(content)
        if content.startswith("[\n"):
            # An array with an element over many lines is not ours to read line by line.
            with pytest.raises(ToolError, match="not a trace of zos-sglang"):
                read(path)
        else:
            assert np.array_equal(read(path).records, made)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"  \n", "not a trace"),
        (b"hello", "no JSON"),
        (b"\x89PNG\r\n\x00\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a": 1}', "no list of events"),
        (b"[]", "not a trace of zos-sglang"),
        (b"[\n", "not a trace of zos-sglang"),
        (b"[\n" + b"[" * 100_000 + b"\n", "not a trace of zos-sglang"),
        (b'[\n{"name":"x","ph":"X","args":{}}\n]\n', "not a trace of zos-sglang"),
        (b'[\n{"name":"zos_meta","args":{"format":99}}\n]\n', "a version of zos-sglang"),
        (b'[\n{"name":"x","ph":"X","args":{"record":"%%"}}\n]\n', "damaged"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ToolError, match=complaint) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_keep_their_meaning_when_enumerations_grow(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    traced(path, steady(3, gpu=2, cpu=1, refusal=["grammar", 0, "lora"]))
    events = json.loads(path.read_text())
    meta = next(e for e in events if e["name"] == META)["args"]
    refusals = meta["columns"]["refusal"]
    first, second = refusals.index("grammar"), refusals.index("lora")
    refusals[first], refusals[second] = refusals[second], refusals[first]
    path.write_text(json.dumps(events))
    assert read(path).records["refusal"].tolist() == [second + 1, 0, first + 1]
    refusals[first] = "a-word-of-tomorrow"
    path.write_text(json.dumps(events))
    with pytest.raises(ToolError, match="a version of zos-sglang"):
        read(path)


def test_each_rank_has_its_own_file(tmp_path: Path) -> None:
    assert file_of("/a/t.json", 0) == file_of("/a/t.json", "") == Path("/a/t.json")
    assert file_of("/a/t.json", 3) == Path("/a/t.tp3.json")
    assert file_of("/a/t", "dp1.tp0") == Path("/a/t.dp1.tp0")


def test_a_trace_is_made_where_it_is_asked_for_and_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_trace(Settings(), 0, {}) is None
    sink = make_trace(Settings(trace=str(tmp_path / "t.json")), 1, {"asynchronous": False})
    assert sink is not None
    sink.close()
    assert read(tmp_path / "t.tp1.json").records.size == 0
    with caplog.at_level(logging.ERROR):
        assert make_trace(Settings(trace=str(tmp_path / "missing" / "t.json")), 0, {}) is None
    assert "no trace: cannot write" in caplog.text
    assert "No such file or directory" in caplog.text


@pytest.mark.parametrize(("rank", "second"), [(0, "t.2.json"), (1, "t.tp1.2.json")])
def test_a_further_trace_of_a_process_leaves_the_first_alone(tmp_path: Path, rank: int, second: str) -> None:
    asked = Settings(trace=str(tmp_path / "t.json"))
    for count in (4, 5):
        sink = make_trace(asked, rank, {})
        assert sink is not None
        sink(steady(count, gpu=2, cpu=1))
        sink.close()
    assert len(read(file_of(str(tmp_path / "t.json"), rank)).records) == 4
    assert len(read(tmp_path / second).records) == 5


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("no such name"), "ValueError: no such name"),
    ],
)
def test_a_fault_of_the_disk_or_of_ours_ends_the_trace_and_never_reaches_the_scheduler(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    told: str,
) -> None:
    made = steady(8, gpu=2, cpu=1)
    sink = TraceSink(tmp_path / "t.json", 10**8, {}, "scheduler 0")
    sink(made[:4])

    def full(*_: object) -> int:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        sink(made[4:])
    sink(made)
    sink.close()
    assert caplog.text.count(told) == 1 and sink.faults == 1


def test_a_traced_step_is_about_as_large_as_planned(tmp_path: Path) -> None:
    """64 MB, the default, then hold about 55,000 steps."""
    path = tmp_path / "t.json"
    traced(path, steady(1000, gpu=2, cpu=1))
    assert STEP.itemsize < path.stat().st_size / 1000 < 1400
