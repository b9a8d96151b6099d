"""The regression's own judgement: each kind of difference is found, equal answers pass."""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from zos_sglang.testing.compare import cli, report, runner
from zos_sglang.testing.compare.client import Client
from zos_sglang.testing.compare.evidence import Evidence, collect, counters, growth, missing
from zos_sglang.testing.compare.records import Record, Records
from zos_sglang.testing.compare.runner import Played, Result, Side, judge, reference_args
from zos_sglang.testing.compare.scenario import Scenario, ServerConfig, Stage
from zos_sglang.testing.compare.scenarios import ALL
from zos_sglang.testing.compare.scenarios.cuts import cut_check
from zos_sglang.testing.compare.scenarios.special import interval_check
from zos_sglang.testing.compare.streams import NativeStream, OpenAIStream
from zos_sglang.testing.compare.verdict import TOLERANCE, burst_fault, compare_records, cut_fault

LENGTH = {"type": "length", "length": 4}
ABORT = {"type": "abort", "message": "Aborted"}


def answers() -> Records:
    """Two ordinary answers."""
    return {
        name: Record(
            name=name,
            sent={"text": "hello", "sampling_params": {"temperature": 0}},
            status=200,
            text="a b c d",
            token_ids=[1, 2, 3, 4],
            finish=dict(LENGTH),
            usage={"prompt_tokens": 5, "completion_tokens": 4},
            fields=["finish_reason", "prompt_tokens"],
            logprobs={"output_token_logprobs": [[-0.5, 1, None], [-0.25, 2, None]]},
            vectors=[[0.5, -1.5]],
            boundaries=[1, 2, 3, 4],
        )
        for name in ("first", "second")
    }


def test_equal_answers_pass() -> None:
    assert compare_records(answers(), answers()) == []


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("token_ids", [1, 2, 9, 4], "[2]"),
        ("token_ids", [1, 2, 3], "[3]"),
        ("text", "a b x d", "[4]"),
        ("finish", {"type": "stop", "matched": 7}, ".type[0]"),
        ("finish", {"type": "length", "length": 5}, ".length"),
        ("usage", {"prompt_tokens": 5, "completion_tokens": 3}, ".completion_tokens"),
        ("usage", {"prompt_tokens": 5}, ".completion_tokens"),
        ("fields", ["finish_reason"], "[1]"),
        ("status", 503, ""),
        ("error", "out of memory", ""),
        (
            "logprobs",
            {"output_token_logprobs": [[-0.5, 1, None], [-0.35, 2, None]]},
            ".output_token_logprobs[1][0]",
        ),
        (
            "logprobs",
            {"output_token_logprobs": [[-0.5, 1, None], [-0.25, 3, None]]},
            ".output_token_logprobs[1][1]",
        ),
        ("logprobs", {"output_token_logprobs": [[-0.5, 1, None]]}, ".output_token_logprobs[1]"),
        ("logprobs", None, ""),
        ("vectors", [[0.5, float("nan")]], "[0][1]"),
        ("sent", {"text": "goodbye"}, ".text[0]"),
    ],
)
def test_a_difference_is_found_with_its_request_field_and_position(
    field: str, value: Any, where: str
) -> None:
    ours = answers()
    setattr(ours["second"], field, value)
    (found,) = compare_records(answers(), ours)
    assert (found.record, found.field, found.where) == ("second", field, where)
    assert field in str(found)


def test_floats_may_differ_in_their_last_bits_only() -> None:
    ours = answers()
    ours["first"].logprobs["output_token_logprobs"][0][0] += TOLERANCE / 2
    assert compare_records(answers(), ours) == []
    ours["first"].logprobs["output_token_logprobs"][0][0] += TOLERANCE
    assert [d.field for d in compare_records(answers(), ours)] == ["logprobs"]


def test_token_ids_get_no_tolerance() -> None:
    ours = answers()
    ours["first"].token_ids = [1, 2, 3, 4.0]  # type: ignore[list-item]
    assert [d.field for d in compare_records(answers(), ours)] == ["token_ids"]


@pytest.mark.parametrize("side", ["stock", "ours"])
def test_an_answer_that_only_one_server_gave_is_found(side: str) -> None:
    both = {"stock": answers(), "ours": answers()}
    del both[side]["second"]
    (found,) = compare_records(both["stock"], both["ours"])
    assert (found.record, found.field) == ("second", "answered")


def test_another_order_of_requests_is_found() -> None:
    (found,) = compare_records(answers(), dict(reversed(answers().items())))
    assert found.field == "order of requests"


def test_the_first_difference_reported_is_the_first_request_sent() -> None:
    ours = answers()
    ours["second"].text = "x"
    ours["first"].text = "y"
    assert [d.record for d in compare_records(answers(), ours)] == ["first", "second"]


def cut_answers(ids: list[int], finish: Any = None) -> Records:
    records = {"full": answers()["first"]}
    records["full"].finish = {"type": "stop", "matched": 4}
    records["cut"] = Record(name="cut", token_ids=ids, finish=finish or dict(ABORT), prefix_of="full")
    return records


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3, 4]])
def test_an_aborted_answer_may_end_anywhere(ids: list[int]) -> None:
    assert compare_records(cut_answers([1, 2]), cut_answers(ids)) == []


@pytest.mark.parametrize(
    ("ids", "finish", "words"),
    [
        ([1, 9], None, "token 1 is 9, not 2"),
        ([1, 2, 3, 4, 5], None, "5 tokens, but the full answer ends after 4"),
        ([1, 2], LENGTH, "instead of abort"),
    ],
)
def test_an_aborted_answer_must_be_a_prefix_that_ends_with_abort(
    ids: list[int], finish: Any, words: str
) -> None:
    records = cut_answers(ids, finish)
    assert words in str(cut_fault(records["cut"], records))
    assert [d.record for d in compare_records(cut_answers([1]), records)] == ["cut"]


def test_an_answer_that_was_complete_before_its_abort_arrived_is_right() -> None:
    records = cut_answers([1, 2, 3], LENGTH)
    records["cut"].sent = {"sampling_params": {"max_new_tokens": 3}}
    assert cut_fault(records["cut"], records) is None
    records["cut"].sent = {"sampling_params": {"max_new_tokens": 4}}
    assert "instead of abort" in str(cut_fault(records["cut"], records))


def test_aborts_that_are_mostly_lost_are_found() -> None:
    def victims(cut: int) -> Records:
        ends = [ABORT] * cut + [LENGTH] * (4 - cut)
        return {str(i): Record(name=str(i), prefix_of="full", finish=end) for i, end in enumerate(ends)}

    assert cut_check(victims(2)) == []
    assert cut_check(victims(1)) == ["only 1 of 4 aborted requests ended with abort"]


def test_an_aborted_answer_may_outlast_a_full_answer_of_lower_length_limit() -> None:
    records = cut_answers([1, 2, 3, 4, 5])
    records["full"].finish = dict(LENGTH)
    assert cut_fault(records["cut"], records) is None


def test_an_aborted_answer_without_its_full_answer_is_a_fault() -> None:
    records = cut_answers([1])
    del records["full"]
    assert "no full answer" in str(cut_fault(records["cut"], records))


def event(ids: list[int], text: str, tokens: int, finish: Any = None) -> str:
    meta = {"finish_reason": finish, "completion_tokens": tokens, "prompt_tokens": 3, "cached_tokens": 0}
    return json.dumps({"text": text, "output_ids": ids, "meta_info": meta})


def native(events: list[str], *, incremental: bool) -> Record:
    record = Record(name="stream")
    reader = NativeStream(record, incremental=incremental)
    for payload in events:
        reader.feed(payload)
    reader.finish()
    return record


DELTAS = [event([1], "a", 1), event([2], "b", 2), event([3], "c", 3, LENGTH), "[DONE]"]
CUMULATIVE = [event([1], "a", 1), event([1, 2], "ab", 2), event([1, 2, 3], "abc", 3, LENGTH), "[DONE]"]


@pytest.mark.parametrize(("events", "incremental"), [(DELTAS, True), (CUMULATIVE, False)])
def test_a_whole_stream_has_no_faults(events: list[str], incremental: bool) -> None:
    record = native(events, incremental=incremental)
    assert record.faults == []
    assert (record.token_ids, record.text, record.boundaries) == ([1, 2, 3], "abc", [1, 2, 3])
    assert record.finish == LENGTH


def test_a_missing_chunk_is_found() -> None:
    record = native([DELTAS[0], *DELTAS[2:]], incremental=True)
    assert any("a chunk is missing" in fault for fault in record.faults)


def test_chunks_in_the_wrong_order_are_found() -> None:
    record = native([CUMULATIVE[1], CUMULATIVE[0], *CUMULATIVE[2:]], incremental=False)
    assert any("do not continue" in fault for fault in record.faults)
    assert any("text does not continue" in fault for fault in record.faults)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (CUMULATIVE[:2], "without a finish reason"),
        (CUMULATIVE[:3], "without [DONE]"),
        ([*CUMULATIVE[:3], CUMULATIVE[2], "[DONE]"], "after the finish reason"),
        ([*CUMULATIVE, CUMULATIVE[2]], "after [DONE]"),
    ],
)
def test_a_stream_that_ends_wrongly_is_found(events: list[str], words: str) -> None:
    assert any(words in fault for fault in native(events, incremental=False).faults)


def test_a_stream_fault_is_a_difference_even_if_the_answers_are_equal() -> None:
    ours = answers()
    ours["second"].faults.append("an event after [DONE]")
    assert [(d.record, d.field) for d in compare_records(answers(), ours)] == [("second", "stream")]


def test_log_probabilities_of_an_incremental_stream_are_joined() -> None:
    record = Record(name="stream")
    reader = NativeStream(record, incremental=True)
    for payload, value in zip(DELTAS[:3], (-0.1, -0.2, -0.3), strict=True):
        piece = json.loads(payload)
        piece["meta_info"]["output_token_logprobs"] = [[value, 1, None]]
        reader.feed(json.dumps(piece))
    assert [lp[0] for lp in reader.final["meta_info"]["output_token_logprobs"]] == [-0.1, -0.2, -0.3]


def openai_stream(events: list[str]) -> dict[int, Record]:
    records: dict[int, Record] = {}

    def file(index: int) -> Record:
        assert index not in records  # one record a choice
        records[index] = Record(name=str(index))
        return records[index]

    reader = OpenAIStream(file, Record(name="0"))
    for payload in events:
        reader.feed(payload)
    reader.finish()
    return records


def choice(index: int, text: str, finish: str | None = None, logprobs: Any = None) -> str:
    piece = {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
    return json.dumps({"choices": [piece]})


def test_openai_log_probabilities_do_not_depend_on_how_events_were_joined() -> None:
    apart = [choice(0, "a", logprobs={"content": [1]}), choice(0, "b", "stop", {"content": [2]}), "[DONE]"]
    joined = [choice(0, "ab", "stop", {"content": [1, 2]}), "[DONE]"]
    assert openai_stream(apart)[0].logprobs == openai_stream(joined)[0].logprobs == {"content": [1, 2]}


def test_choices_of_one_openai_stream_are_kept_apart() -> None:
    events = [choice(0, "a"), choice(1, "x"), choice(0, "b", "stop"), choice(1, "y", "length"), "[DONE]"]
    records = openai_stream(events)
    assert [records[i].text for i in (0, 1)] == ["ab", "xy"]
    assert [records[i].finish_type for i in (0, 1)] == ["stop", "length"]
    assert not records[0].faults and not records[1].faults


def test_openai_text_after_the_finish_reason_is_found() -> None:
    records = openai_stream([choice(0, "a", "stop"), choice(0, "b"), "[DONE]"])
    assert any("after the finish reason" in fault for fault in records[0].faults)


def test_delivery_in_bursts_is_found() -> None:
    stock = {"s": Record(name="s", boundaries=list(range(1, 81)))}
    joined = {"s": Record(name="s", boundaries=[40, 80])}
    some = {"s": Record(name="s", boundaries=list(range(1, 81, 2)))}
    assert "bursts" in str(burst_fault(stock, joined))
    assert burst_fault(stock, some) is None


def test_events_between_the_allowed_counts_are_found() -> None:
    def stream(boundaries: list[int]) -> Records:
        return {"s": Record(name="s", token_ids=[0] * 20, boundaries=boundaries)}

    check = interval_check(8)
    assert check(stream([1, 9, 17, 20])) == []
    assert check(stream([1, 17, 20])) == []  # joined on the way
    assert "after [5] tokens" in check(stream([1, 5, 20]))[0]
    assert "go back" in check(stream([9, 1, 20]))[0]


# ---------------------------------------------------------------- client


def play(handler: Any, use: Any, **options: Any) -> Client:
    """Run `use(client)` against an HTTP handler instead of a server."""

    async def run() -> Client:
        client = Client("http://test", scenario="unit", **options)
        client.http = httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://test")
        await use(client)
        await client.close()
        return client

    return asyncio.run(run())


def test_a_streamed_answer_is_filed_with_what_is_compared() -> None:
    seen: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, text="".join(f"data: {e}\n\n" for e in CUMULATIVE))

    client = play(handler, lambda c: c.generate("one", [1, 2], {"temperature": 0}, stream=True))
    record = client.records["one"]
    assert (record.status, record.token_ids, record.finish) == (200, [1, 2, 3], LENGTH)
    assert record.usage == {"prompt_tokens": 3, "completion_tokens": 3}
    assert seen[0]["rid"] == client.rid("one") and "rid" not in record.sent


def test_a_refused_request_is_an_answer_with_status_and_message() -> None:
    client = play(
        lambda request: httpx.Response(400, text="no such thing"),
        lambda c: c.generate("one", "text", {}),
    )
    assert (client.records["one"].status, client.records["one"].error) == (400, "no such thing")


def test_a_control_call_that_fails_is_a_fault() -> None:
    client = play(lambda request: httpx.Response(400, text="not idle"), lambda c: c.must("/flush_cache"))
    assert "answered 400" in client.records["/flush_cache#1"].faults[0]


def test_two_requests_of_one_name_are_refused() -> None:
    client = Client("http://test")
    client.file("one", {})
    with pytest.raises(ValueError, match="two requests"):
        client.file("one", {})


def test_cached_tokens_are_compared_only_on_request() -> None:
    body = {"text": "a", "output_ids": [1], "meta_info": json.loads(CUMULATIVE[0])["meta_info"]}

    async def asked(client: Client) -> None:
        await client.generate("plain", "x", {})
        client.compare_cached = True
        await client.generate("cached", "x", {})

    client = play(lambda request: httpx.Response(200, json=body), asked)
    assert "cached_tokens" not in client.records["plain"].usage
    assert client.records["cached"].usage["cached_tokens"] == 0


# ---------------------------------------------------------------- evidence and judgement


def test_counters_are_the_growth_during_the_scenario() -> None:
    before = {"reasons": {"overlapped": 5, "first-token": 2}, "paths": {"decode": 7}}
    after = {"reasons": {"overlapped": 9, "first-token": 2}, "paths": {"decode": 8}}
    assert growth(counters(before), counters(after)) == {"reasons.overlapped": 4, "paths.decode": 1}


def evidence_faults(zos: dict[str, int], log: str = "", *, counted: bool = True) -> list[str]:
    wanted = Evidence(
        reasons=("overlapped",),
        paths=("mixed",),
        never=("first-token",),
        log=("Retract",),
        seen={"answers": len},
        batch=4,
    )
    found = collect(wanted, answers(), log, zos)
    return missing(wanted, found, zos, side="ours", our_counters=counted)


FIRED = {"reasons.overlapped": 3, "paths.mixed": 1}
LOG = "Decode batch, #running-req: 4, x\nRetract requests"


def test_evidence_that_is_all_there_passes() -> None:
    assert evidence_faults(FIRED, LOG) == []


@pytest.mark.parametrize(
    ("zos", "log", "words"),
    [
        ({"paths.mixed": 1}, LOG, "reasons.overlapped fired zero times"),
        ({"reasons.overlapped": 3}, LOG, "paths.mixed fired zero times"),
        (FIRED | {"reasons.first-token": 1}, LOG, "first-token fired 1 times, must be zero"),
        (FIRED, "Decode batch, #running-req: 4, x", "Retract (log) fired zero times"),
        (FIRED, "Decode batch, #running-req: 2, x\nRetract", "at most 2 requests ran together"),
    ],
)
def test_evidence_that_is_missing_is_named(zos: dict[str, int], log: str, words: str) -> None:
    (fault,) = evidence_faults(zos, log)
    assert words in fault


def test_counters_are_not_asked_of_a_server_that_does_not_overlap() -> None:
    assert evidence_faults({}, LOG, counted=False) == []


async def nothing(stage: Stage) -> None:
    """Plays nothing."""


SCENARIO = Scenario(
    "unit", "of a test", nothing, ServerConfig("unit"), Evidence(reasons=("overlapped",), batch=0)
)


def judged(**ours: Any) -> Result:
    fired = {"reasons.overlapped": 2}
    result = Result(
        SCENARIO,
        stock=Played(records=answers()),
        ours=Played(records=answers(), zos=dict(fired), found=dict(fired)),
    )
    for key, value in ours.items():
        setattr(result.ours, key, value)
    judge(result, Side("ours", "overlap"))
    return result


def test_equal_answers_with_their_evidence_are_judged_equal() -> None:
    assert judged().passed


@pytest.mark.parametrize(
    "ours",
    [
        {"broken": "ReadError: server gone"},
        {"faults": ["after the scenario: not idle"]},
        {"found": {"reasons.overlapped": 0}},
        {"zos": {"reasons.overlapped": 2, "paths.fallbacks": 1}},
        {"zos": {"reasons.overlapped": 2, "paths.stalls": 1}},
        {"records": {}},
    ],
)
def test_anything_wrong_on_our_side_fails_the_scenario(ours: dict[str, Any]) -> None:
    assert not judged(**ours).passed


def test_mode_sync_is_compared_with_stock_without_overlap() -> None:
    assert reference_args("sync") == ("--disable-overlap-schedule",)
    assert reference_args("overlap") == reference_args(None) == ()


def test_every_scenario_has_a_name_of_its_own_and_evidence() -> None:
    assert len({s.name for s in ALL}) == len(ALL)
    for scenario in ALL:
        wanted = scenario.evidence
        assert wanted.reasons or wanted.paths, scenario.name
        assert wanted.batch or wanted.seen, scenario.name


# ---------------------------------------------------------------- command line


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_the_scenarios_are_listed_for_scripts_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--suite", "full", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert cli.main(["--suite", "full", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(listed) == sum(not line.startswith(" ") for line in lines) > 30
    assert set(listed[0]) == {"name", "about", "config", "on_cpu"}


def run_cli(monkeypatch: pytest.MonkeyPatch, argv: list[str], result: Result | None = None) -> int:
    monkeypatch.setattr(runner, "run", lambda plan, scenarios: [result or judged()])
    # Logs that a failed run leaves behind belong to the test.
    monkeypatch.setattr(tempfile, "tempdir", argv[argv.index("--model") + 1])
    return cli.main(argv)


def test_exit_code_0_if_all_is_equal(monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out" / "result.json"
    assert run_cli(monkeypatch, ["--model", folder, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["scenarios"][0]["equal"] is True
    assert "1 of 1 scenarios equal; 2 requests and 8 tokens" in written["totals"]


def test_json_is_all_that_stdout_gets_one_line_a_mode(
    monkeypatch: pytest.MonkeyPatch, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, ["--model", folder, "--mode", "overlap,resident", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["run"]["mode"] for line in out.splitlines()] == ["overlap", "resident"]
    assert "1 of 1 scenarios equal" in err


def test_several_modes_are_held_against_one_play_of_stock(
    monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path
) -> None:
    played: list[tuple[str, str | None, tuple[str, ...], dict[str, str]]] = []

    def play(plan: runner.Plan, config: ServerConfig, side: Side, scenarios: list[Scenario]) -> list[Played]:
        played.append((side.name, side.mode, plan.args, dict(plan.our_env)))
        return [Played(broken="not a server") for _ in scenarios]

    monkeypatch.setattr(runner, "_play_group", play)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    argv = [
        "--model",
        folder,
        "--config",
        "mixed-chunk",
        "--suite",
        "full",
        "--mode",
        "overlap,resident,sync",
    ]
    argv += ["--server-args", "--tp 2", "--env", "ZOS_CHECK_RANKS=8", "--out", str(tmp_path / "{mode}.json")]
    assert cli.main(argv) == 1
    # Stock without overlap, which mode sync is held against, is another stock.
    sides = [("stock", None), ("ours", "overlap"), ("ours", "resident"), ("stock", None), ("ours", "sync")]
    assert [call[:2] for call in played] == sides
    assert {call[2] for call in played} == {("--tp", "2")} and played[0][3] == {"ZOS_CHECK_RANKS": "8"}
    for mode in ("overlap", "resident", "sync"):
        run = json.loads((tmp_path / f"{mode}.json").read_text())["run"]
        assert (run["mode"], run["configs"], run["server_args"]) == (mode, ["mixed-chunk"], "--tp 2")
        assert run["commit"] and run["machine"]


def test_compared_ranks_are_counted_and_a_difference_is_never_right() -> None:
    ranks = {"decisions": 9, "agreed": 8, "blocks": 2, "differences": 0, "sound": True}
    assert counters({"ranks": ranks})["ranks.blocks"] == 2
    result = judged(zos={"reasons.overlapped": 2, "ranks.differences": 1})
    assert any("ranks.differences = 1, must be zero" in fault for fault in result.faults)
    assert report.ranks_total([judged(zos={"ranks.blocks": 3}), judged(zos={"ranks.blocks": 4})]) == {
        "blocks": 7
    }


def test_exit_code_1_and_the_differing_request_shown(
    monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = answers()
    records["second"].token_ids = [1, 2, 9, 4]
    out = tmp_path / "result.json"
    assert run_cli(monkeypatch, ["--model", folder, "--out", str(out)], judged(records=records)) == 1
    shown = capsys.readouterr().out
    assert "second: token_ids at [2]: stock 3, ours 9" in shown
    assert '"text": "hello"' in shown and "[1, 2, 9, 4]" in shown and "[1, 2, 3, 4]" in shown
    assert json.loads(out.read_text())["scenarios"][0]["differing"]["second"]["ours"]["token_ids"] == [
        1,
        2,
        9,
        4,
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--scenario", "no-such-thing"], "no-such-thing: unknown; one of mixed-lengths"),
        (["--suite", "everything"], "invalid choice"),
        (["--mode", "warp"], "invalid choice"),
        (["--config", "no-such-start"], "no-such-start: unknown; one of delay-sample"),
        (["--mode", "overlap,resident", "--out", "one.json"], "write {mode} where the name of each goes"),
        (["--model", "/nowhere"], "--model /nowhere: neither tiny"),
    ],
)
def test_exit_code_2_for_bad_usage(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_what_cannot_run_here_is_printed_with_its_reason() -> None:
    console = Console(record=True, width=200)
    result = Result(copy.copy(SCENARIO), skipped="no such device")
    report.print_report(console, [result], "title")
    assert "unit: no such device" in console.export_text()
    assert "0 of 0 scenarios equal" in report.totals([result])
