"""The soak's judge, sources and figures: a soak that cannot fail would prove nothing."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from httpcore._async.http11 import AsyncHTTP11Connection

from zos_sglang.testing.compare.records import Record
from zos_sglang.testing.soak import cli
from zos_sglang.testing.soak.judge import IN_CHUNKS, Life, Tally, faults_of, outcome_of
from zos_sglang.testing.soak.plan import GPU, Ask, Scale, Source, questions
from zos_sglang.testing.soak.traffic import Traffic, client
from zos_sglang.testing.soak.truth import Expected, Oracle, Recorded
from zos_sglang.testing.soak.watch import Process, Sample, growth, processes_of, slope

SHORT = Life(seconds=1.0, all_aborted=False)
TIMEOUT_S = 8.0


def ask(tokens: int = 4, **more) -> Ask:
    given = {"cut": "none", "after_s": 0.0, "priority": 0, "stream": False, **more}
    return Ask(rid="soak-0-1", question=0, tokens=tokens, **given)


def record(ids, finish="length", status=200, **more) -> Record:
    usage = {"prompt_tokens": 5, "completion_tokens": len(ids)}
    return Record("soak-0-1", status=status, token_ids=ids, finish={"type": finish}, usage=usage, **more)


def outcome(asked: Ask, answer: Record, life: Life = SHORT) -> tuple[str, str | None]:
    return outcome_of(asked, answer, life, TIMEOUT_S)


def answer_of(ids: list[int], finish: str) -> dict:
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": finish}}}


# ------------------------------------------------------------------ truth


def test_a_shorter_answer_is_the_start_of_the_recorded_one_and_ends_by_length():
    truth = Recorded([answer_of([1, 2, 3, 9], "stop")])
    assert truth.expected(ask(2)) == Expected([1, 2], frozenset({"length"}))
    assert truth.expected(ask(8)) == Expected([1, 2, 3, 9], frozenset({"stop"}))
    assert truth.expected(ask(4)) == Expected([1, 2, 3, 9], frozenset({"stop", "length"}))


def test_the_oracle_knows_every_answer_by_request_and_position():
    asked = questions(GPU, vocab=64, seed=0)
    truth = Oracle(asked, vocab=64)
    found = truth.expected(ask(400))
    assert found.ids == truth.expected(ask(400)).ids and set(found.ids) <= set(range(64))
    assert (found.ids[-1] == 63) == (found.finish == {"stop"})


# ------------------------------------------------------------------ clients


def test_clients_that_leave_between_connection_and_request_leave_no_connection_behind(monkeypatch):
    async def not_yet(*_: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(AsyncHTTP11Connection, "handle_async_request", not_yet)
    assert asyncio.run(connections_after_hanging_up(clients=5)) == 0


async def connections_after_hanging_up(clients: int) -> int:
    """Connections that a server which never answers still has, while the soak's client lives on."""
    opened: set[asyncio.StreamWriter] = set()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.add(writer)
        while await reader.read(1024):
            pass
        opened.discard(writer)
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    scale = Scale()
    asked = questions(scale, vocab=512, seed=0)
    async with client(f"http://127.0.0.1:{port}") as http:
        traffic = Traffic(http, asked, Oracle(asked, vocab=512), Source(scale, 0), tally := Tally())

        async def leave(number: int) -> None:
            await traffic._ask(replace(ask(cut="hang up"), rid=f"soak-0-{number}"))

        await asyncio.gather(*map(leave, range(clients)))
        for _ in range(100):  # what is closed here is seen there a moment later
            if not opened:
                break
            await asyncio.sleep(0.02)
        left = len(opened)
    assert tally.outcomes == {"hung up": clients}
    server.close()
    return left


# ------------------------------------------------------------------ judge


def test_a_whole_answer_like_stock_has_no_fault():
    wanted = Expected([1, 2, 3, 4], frozenset({"length"}))
    assert outcome(ask(), record([1, 2, 3, 4])) == ("finished", None)
    assert faults_of(ask(), record([1, 2, 3, 4]), wanted, 5, "finished") == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (record([1, 2, 7, 4]), "token 2 of 4 is 7"),
        (record([1, 2, 3]), "3 tokens, 4 expected"),
        (record([1, 2, 3, 4], finish="stop"), "finish reason stop"),
        (record([1, 2, 3, 4, 5]), "token 4 of 5 is 5"),
        (record([1, 2, 3, 4], faults=["2 token ids after the finish reason"]), "after the finish reason"),
    ],
)
def test_a_wrong_answer_is_named(answer: Record, words: str):
    wanted = Expected([1, 2, 3, 4], frozenset({"length"}))
    assert words in " ".join(faults_of(ask(), answer, wanted, 5, "finished"))


def test_wrong_counts_are_named():
    wanted = Expected([1, 2, 3, 4], frozenset({"length"}))
    answer = record([1, 2, 3, 4])
    answer.usage = {"prompt_tokens": 6, "completion_tokens": 3}
    assert len(faults_of(ask(), answer, wanted, 5, "finished")) == 2


def test_an_aborted_answer_must_be_the_start_of_the_recorded_one():
    wanted = Expected([1, 2, 3, 4], frozenset({"length"}))
    assert faults_of(ask(), record([1, 2], "abort"), wanted, 5, "aborted") == []
    assert faults_of(ask(), record([1, 3], "abort"), wanted, 5, "aborted")


def test_only_who_was_aborted_may_end_so():
    answer = record([1], "abort")
    assert outcome(ask(cut="abort"), answer) == ("aborted", None)
    assert outcome(ask(), answer, Life(1.0, all_aborted=True)) == ("aborted", None)
    kind, fault = outcome(ask(), answer)
    assert kind == "aborted" and fault is not None and "by nobody" in fault


def test_a_time_limit_that_strikes_early_is_a_fault():
    answer = Record("x", status=503, error="Request running timeout reached.")
    assert outcome(ask(), answer, Life(8.2, all_aborted=False)) == ("timed out", None)
    kind, fault = outcome(ask(), answer, Life(2.0, all_aborted=False))
    assert kind == "timed out" and fault is not None


def test_a_time_limit_in_the_words_of_an_abort_is_one_only_if_it_was_time():
    answer = Record("x", status=200, token_ids=[], finish={"type": "abort", "message": IN_CHUNKS})
    assert outcome(ask(), answer, Life(TIMEOUT_S, all_aborted=False)) == ("timed out", None)
    kind, fault = outcome(ask(), answer, Life(TIMEOUT_S / 2, all_aborted=False))
    assert kind == "aborted" and fault is not None and "by nobody after" in fault


def test_an_answer_without_an_end_is_lost():
    answer = Record("x", status=200, token_ids=[1])
    kind, fault = outcome(ask(), answer)
    assert kind == "lost" and fault is not None


# ------------------------------------------------------------------ what is asked


def test_the_same_seed_asks_the_same_in_the_same_order():
    first, again, other = (Source(Scale(), seed) for seed in (3, 3, 4))
    drawn = [first.draw() for _ in range(200)]
    assert drawn == [again.draw() for _ in range(200)] != [other.draw() for _ in range(200)]
    assert {one.cut for one in drawn} == {"none", "abort", "hang up"}
    assert {one.stream for one in drawn} == {True, False}


def test_no_request_id_is_the_start_of_another():
    source = Source(Scale(), 1)
    ids = sorted(source.draw().rid for _ in range(300))
    assert not [pair for pair in pairwise(ids) if pair[1].startswith(pair[0])]


def test_the_mixture_has_long_prompts_shared_prefixes_and_grammars_and_fits_the_pool():
    for scale in (Scale(), GPU):
        asked = questions(scale, 384, seed=0)
        longest = max(len(one.ids) for one in asked)
        assert longest > scale.chunk and longest + scale.output[1] < scale.pool
        assert any("regex" in one.params for one in asked) != scale.oracle
        starts = [one.ids[: scale.prefix[0]] for one in asked]
        assert len(set(starts)) < len(starts)


# ------------------------------------------------------------------ figures


def test_growth_is_that_of_the_second_half():
    def sample(minute: float, rss: float) -> Sample:
        return Sample(minute, {"scheduler": Process(rss, 10, 4)}, 0, 0, 0)

    found = growth([sample(0, 100), sample(1, 900), sample(2, 910), sample(3, 920), sample(4, 930)])
    assert found["scheduler"]["rss_mb_per_minute"] == 10.0
    assert found["scheduler"]["fds_per_minute"] == 0.0
    assert growth([]) == {}


def test_memory_of_the_device_counts_like_that_of_a_process():
    samples = [Sample(minute, {}, 0, 0, 0, gpu_mb=1000 + 3 * minute) for minute in range(4)]
    assert growth(samples)["gpu"]["rss_mb_per_minute"] == 3.0


def test_slope_of_a_line_is_its_slope():
    assert slope([(0, 1), (1, 3), (2, 5)]) == 2
    assert slope([(1, 1)]) == 0


def test_processes_of_a_server_are_seen_with_memory_and_descriptors():
    own = processes_of(os.getpid())["launcher"]
    assert own.rss_mb > 10 and own.fds > 2 and own.threads >= 1
    assert own.kinds["file"] >= 1 and abs(sum(own.kinds.values()) - own.fds) <= 3


def test_the_flags_of_a_soak_switch_the_canary_on():
    args = cli.parser().parse_args(["--canary", "--server-args", "--page-size 16"])
    config = cli.config_of(args, GPU)
    flags = config.command_args(cuda=True)
    assert "--kv-canary" in flags and flags[-2:] == ["--page-size", "16"]
    assert config.env["SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE"] == "1" and not config.tokenizer
