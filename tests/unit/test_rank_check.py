"""Between ranks over a real store of torch.distributed: the board, and what all ranks have or none."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from zos_sglang.settings import Settings
from zos_sglang.upstream import rank_board, rank_check, runtime
from zos_sglang.upstream.rank_board import StoreBoard, all_ranks_have


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def group(rank: int, size: int = 2) -> Any:
    return SimpleNamespace(rank=rank, ranks=list(range(size)), world_size=size)


def test_a_board_gives_what_is_there_and_does_not_wait_for_what_is_not(store: Any) -> None:
    mine, theirs = StoreBoard(store), StoreBoard(store)
    begun = time.monotonic()
    assert theirs.get("0/0") is None
    mine.put("0/0", b"a\nb")
    while theirs.get("0/0") != b"a\nb" and time.monotonic() < begun + 5:
        time.sleep(0.01)
    assert theirs.get("0/0") == b"a\nb"
    mine.remove("0/0")
    mine.remove("0/0")
    assert theirs.get("0/0") is None and time.monotonic() - begun < 5


def test_a_board_answers_while_somebody_else_waits_in_the_store(store: Any) -> None:
    board = StoreBoard(store)
    waiting = threading.Thread(target=lambda: store.get("never before the end"), daemon=True)
    waiting.start()
    time.sleep(0.1)
    begun = time.monotonic()
    board.put("x", b"1")
    assert board.get("x") == b"1" and time.monotonic() - begun < 2
    store.clone().set("never before the end", b"")
    waiting.join(5)
    assert not waiting.is_alive()


@pytest.mark.parametrize(("here", "wanted"), [((True, True), True), ((True, False), False)])
def test_all_ranks_have_it_or_none(store: Any, here: tuple[bool, bool], wanted: bool) -> None:
    def ask(rank: int) -> bool:
        time.sleep(0.2 * rank)
        return all_ranks_have("lane", here[rank], group(rank), StoreBoard(store))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == [wanted, wanted]


def test_a_rank_that_says_nothing_counts_as_without(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_board, "_AGREEMENT_S", 0.2)
    assert not all_ranks_have("lane", True, group(0), StoreBoard(store))
    assert "no answer at lane/1" in caplog.text


def test_one_rank_asks_nobody() -> None:
    assert all_ranks_have("lane", True, group(0, 1)) and not all_ranks_have("lane", False, group(0, 1))


def test_where_nobody_can_be_asked_a_rank_goes_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StoreBoard):
        def __init__(self) -> None: ...

        def put(self, key: str, value: bytes) -> None:
            raise RuntimeError("no store")

    assert all_ranks_have("lane", True, group(0), Broken())
    assert "cannot be asked" in caplog.text


def test_tokens_on_the_host_are_compared_and_others_are_left_alone() -> None:
    host = SimpleNamespace(next_token_ids=torch.tensor([3, 5]))
    assert rank_check.tokens(host).tobytes() == torch.tensor([3, 5]).numpy().tobytes()
    assert rank_check.tokens(SimpleNamespace(next_token_ids=[1])) is None
    assert rank_check.tokens(SimpleNamespace()) is None


def test_the_server_is_told_first_and_then_the_process_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    launcher: Any = SimpleNamespace(send_signal=done.append)
    monkeypatch.setattr(rank_check.time, "sleep", done.append)
    monkeypatch.setattr(rank_check.os, "kill", lambda pid, number: done.append((pid, number)))
    rank_check.stop_server(launcher)
    assert done == [signal.SIGQUIT, rank_check._GRACE_S, (psutil.Process().pid, signal.SIGKILL)]


def test_without_a_launcher_the_process_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def gone(_: Any) -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(rank_check.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(rank_check.os, "kill", lambda pid, number: done.append(number))
    rank_check.stop_server(SimpleNamespace(send_signal=gone))  # type: ignore[arg-type]
    rank_check.stop_server(None)
    assert done == [signal.SIGKILL] * 2


def test_the_check_is_off_by_default_and_with_one_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(rank_check, "get_parallel", lambda: SimpleNamespace(tp_group=group(0, 1)))
    lane: Any = None
    assert rank_check.build_rank_check(None, Settings(), lane) is None and not caplog.text
    assert rank_check.build_rank_check(None, Settings(check_ranks=4), lane) is None
    assert "there is one rank" in caplog.text


def test_where_ranks_cannot_be_compared_the_server_runs_unchecked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parallel = SimpleNamespace(tp_group=group(0), attn_dp_enabled=False)
    monkeypatch.setattr(rank_check, "get_parallel", lambda: parallel)
    lane: Any = None
    assert rank_check.build_rank_check(None, Settings(check_ranks=4), lane) is None  # no process group here
    assert "ranks cannot be compared here" in caplog.text


@pytest.mark.parametrize("others", [True, False])
def test_the_lane_of_one_rank_alone_is_given_up(monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    one: Any = runtime.Runtime()
    one.scheduler = SimpleNamespace(tp_group=group(0))
    one._launcher = SimpleNamespace(port=SimpleNamespace(lane_results="results"))
    monkeypatch.setattr(one, "_build_lane", lambda parts: "lane")
    monkeypatch.setattr(rank_board, "all_ranks_have", lambda what, here, group: here and others)
    assert one._lane_of_all_ranks("parts") == ("lane" if others else None)
    assert one._launcher.port.lane_results == ("results" if others else None)
    assert one.lane_account.report()["refused"] == ({} if others else {"closed-for-good": 1})


def test_the_report_counts_blocks_and_the_stall_report_names_the_last_decision_agreed_in() -> None:
    log: Any = SimpleNamespace(rows=11, sound=True)
    exchange: Any = SimpleNamespace(agreed=0, blocks=0, differences=0, peers=[SimpleNamespace(rank=1)])
    check = rank_check.RankCheck(4, log, exchange, SimpleNamespace(cpu_s=0.25))  # type: ignore[arg-type]
    assert check.describe() == "ranks: no decision compared yet; this rank has made 11"
    exchange.agreed, exchange.blocks = 9, 2
    assert check.describe() == "ranks: agreed up to decision 8; this rank has made 11"
    report = check.report()
    assert (report["every"], report["blocks"], report["agreed"], report["differences"]) == (4, 2, 9, 0)
    assert (report["peers"], report["thread_cpu_s"]) == ([1], 0.25)


def test_the_stall_report_and_the_server_info_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = runtime.Runtime()
    stream = SimpleNamespace()
    one.scheduler = SimpleNamespace(
        result_queue=[],
        cur_batch_for_debug=None,
        schedule_stream=stream,
        forward_stream=stream,
        copy_stream=stream,
    )
    one.ranks = SimpleNamespace(
        describe=lambda: "ranks: agreed up to decision 8", report=lambda: {"blocks": 2}
    )
    assert one.describe()[-1] == "ranks: agreed up to decision 8"
    monkeypatch.setattr(one, "prefill_rule", lambda: SimpleNamespace(value="never"))
    assert one.report()["ranks"] == {"blocks": 2}
    one.ranks = None
    assert "ranks" not in one.report() and not one.describe()[-1].startswith("ranks")
