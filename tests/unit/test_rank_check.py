"""Between ranks over a real store of torch.distributed: the board, and what all ranks have or none."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import _parallel_config_leaves
from torch.distributed import TCPStore

from zos_sglang.ranks.row import FIELDS, SHARED
from zos_sglang.settings import Settings
from zos_sglang.upstream import rank_board, rank_check, runtime
from zos_sglang.upstream.rank_board import StoreBoard, all_ranks_have


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def group(rank: int, size: int = 2) -> Any:
    return SimpleNamespace(rank=rank, ranks=list(range(size)), world_size=size)


def board_of(store: Any, attachment: int = 1) -> Callable[[], StoreBoard]:
    return lambda: StoreBoard(store, attachment)


def test_a_board_gives_what_is_there_and_does_not_wait_for_what_is_not(store: Any) -> None:
    mine, theirs = StoreBoard(store, 1), StoreBoard(store, 1)
    begun = time.monotonic()
    assert theirs.get("0/0") is None
    mine.put("0/0", b"a\nb")
    while theirs.get("0/0") != b"a\nb" and time.monotonic() < begun + 20:
        time.sleep(0.01)
    assert theirs.get("0/0") == b"a\nb"
    mine.remove("0/0")
    mine.remove("0/0")
    assert theirs.get("0/0") is None and time.monotonic() - begun < 20


def test_a_board_answers_while_somebody_else_waits_in_the_store(store: Any) -> None:
    board = StoreBoard(store, 1)
    waiting = threading.Thread(target=lambda: store.get("never before the end"), daemon=True)
    waiting.start()
    time.sleep(0.1)
    begun = time.monotonic()
    board.put("x", b"1")
    assert board.get("x") == b"1" and time.monotonic() - begun < 20
    store.clone().set("never before the end", b"")
    waiting.join(5)
    assert not waiting.is_alive()


def lane_of_all(here: bool, of: Any, board: Any, within_s: float = 20.0) -> bool:
    return all_ranks_have("lane", here, of, board, within_s)


@pytest.mark.parametrize(("here", "wanted"), [((True, True), True), ((True, False), False)])
def test_all_ranks_have_it_or_none(store: Any, here: tuple[bool, bool], wanted: bool) -> None:
    def ask(rank: int) -> bool:
        time.sleep(0.2 * rank)
        return lane_of_all(here[rank], group(rank), board_of(store))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == [wanted, wanted]


def test_a_rank_that_says_nothing_counts_as_without(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is named: soon, as what is waited for, and when time is over."""
    monkeypatch.setattr(rank_board, "_QUIET_S", 0.1)
    assert not lane_of_all(True, group(0), board_of(store), 0.3)
    waiting, given_up = [record.getMessage() for record in caplog.records]
    assert "waiting for lane/1" in waiting and "no answer at lane/1" in given_up


def test_what_one_rank_concluded_holds_for_one_that_comes_too_late(store: Any) -> None:
    assert not lane_of_all(True, group(0), board_of(store), 0.1)
    # All answers are there now, each of them "yes".
    assert not lane_of_all(True, group(1), board_of(store))


def test_groups_over_one_store_conclude_each_for_itself(store: Any) -> None:
    first, second = (SimpleNamespace(world_size=2, ranks=ranks) for ranks in ([0, 1], [2, 3]))
    assert not lane_of_all(False, SimpleNamespace(rank=0, **vars(first)), board_of(store))
    board_of(store)().put("lane/3", b"yes")
    assert lane_of_all(True, SimpleNamespace(rank=2, **vars(second)), board_of(store))


def test_a_server_that_changed_its_role_is_asked_anew(store: Any) -> None:
    assert not lane_of_all(False, group(0), board_of(store, 1))
    board_of(store, 2)().put("lane/1", b"yes")
    assert lane_of_all(True, group(0), board_of(store, 2))


def test_a_board_shows_nothing_of_the_attachment_before(store: Any) -> None:
    StoreBoard(store, 1).put("1/0", b"row")
    assert StoreBoard(store, 2).get("1/0") is None
    assert StoreBoard(store, 1).get("1/0") == b"row"


def test_one_rank_asks_nobody() -> None:
    def board() -> StoreBoard:
        raise AssertionError("asked")

    assert lane_of_all(True, group(0, 1), board)
    assert not lane_of_all(False, group(0, 1), board)


class Deaf(StoreBoard):
    """Writes and cannot read."""

    def get(self, key: str) -> bytes | None:
        raise RuntimeError("no store")


def test_a_rank_that_cannot_ask_counts_as_without_for_the_others_too(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert not lane_of_all(True, group(0), lambda: Deaf(store, 1))
    assert "cannot be asked" in caplog.text
    assert not lane_of_all(True, group(1), board_of(store))


def test_a_rank_that_cannot_ask_goes_by_what_another_concluded(store: Any) -> None:
    board_of(store)().put("lane/0", b"yes")
    assert lane_of_all(True, group(1), board_of(store))
    assert lane_of_all(True, group(0), lambda: Deaf(store, 1))


def test_without_any_board_a_rank_counts_as_without(caplog: pytest.LogCaptureFixture) -> None:
    def none() -> StoreBoard:
        raise RuntimeError("no store")

    assert not lane_of_all(True, group(0), none)
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
    assert rank_check.build_rank_check(None, Settings(), lane, 1) is None and not caplog.text
    assert rank_check.build_rank_check(None, Settings(check_ranks=4), lane, 1) is None
    assert "there is one rank" in caplog.text


def test_where_ranks_cannot_be_compared_the_server_runs_unchecked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parallel = SimpleNamespace(tp_group=group(0), attn_dp_enabled=False)
    monkeypatch.setattr(rank_check, "get_parallel", lambda: parallel)
    lane: Any = None
    assert rank_check.build_rank_check(None, Settings(check_ranks=4), lane, 1) is None  # no process group
    assert "ranks cannot be compared here" in caplog.text


def peers_under_dp_attention(
    monkeypatch: pytest.MonkeyPatch, store: Any, size: int, **flags: Any
) -> list[tuple[int, Any]] | None:
    """Peers of rank 0 of `size` ranks in two attention groups; None where there is no check."""
    parallel = SimpleNamespace(tp_group=group(0, size), attn_dp_enabled=True, attn_dp_size=2, **flags)
    monkeypatch.setattr(rank_check, "get_parallel", lambda: parallel)
    monkeypatch.setattr(rank_board, "_get_default_store", lambda: store)
    lane: Any = None
    check = rank_check.build_rank_check(None, Settings(check_ranks=4), lane, 1)
    if check is None:
        return None
    check.close()
    return [(peer.rank, peer.fields) for peer in check.exchange.peers]


IN_STEP = {"dwdp_size": 1, "enable_dp_attention_local_control_broadcast": False}


def test_attention_groups_in_step_are_compared(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    assert peers_under_dp_attention(monkeypatch, store, 4, **IN_STEP) == [(1, FIELDS), (2, SHARED)]


BY_ITSELF = [
    ({"enable_dp_attention_local_control_broadcast": True}, False, "local-control-broadcast"),
    ({"dwdp_size": 4}, False, "DWDP"),
    ({}, True, "SGLANG_SCHEDULER_SKIP_ALL_GATHER"),
]


@pytest.mark.parametrize("case", BY_ITSELF, ids=lambda case: case[2])
def test_where_upstream_lets_attention_groups_differ_they_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, store: Any, caplog: pytest.LogCaptureFixture, case: Any
) -> None:
    caplog.set_level("INFO")
    flags, variable, said = case
    with envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.override(variable):
        found = peers_under_dp_attention(monkeypatch, store, 4, **{**IN_STEP, **flags})
        assert found == [(1, FIELDS)]
        assert caplog.text.count("only within attention groups") == 1 and said in caplog.text
        assert peers_under_dp_attention(monkeypatch, store, 2, **{**IN_STEP, **flags}) is None
    assert "no other to be compared with" in caplog.text


def test_upstream_has_these_flags() -> None:
    assert set(IN_STEP) <= _parallel_config_leaves()


def test_every_attachment_has_a_board_of_its_own_even_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = runtime.Runtime()
    monkeypatch.setattr(runtime, "role_of", lambda scheduler: 1 / 0)
    for _ in range(2):
        one.run(lambda scheduler: None, SimpleNamespace(tp_group=group(0, 1)))
    seen: list[StoreBoard] = []
    one.scheduler = SimpleNamespace(tp_group=group(0))
    monkeypatch.setattr(one, "_build_lane", lambda parts: "lane")
    monkeypatch.setattr(StoreBoard, "of_this_group", lambda attachment: attachment)
    monkeypatch.setattr(
        rank_board, "all_ranks_have", lambda what, here, group, board, within_s: seen.append(board()) or True
    )
    assert one._lane_of_all_ranks("parts") == "lane"
    assert seen == [2]


def test_stock_runs_on_every_rank_if_one_cannot_attach(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one: Any = runtime.Runtime()
    stopped: list[str] = []
    monkeypatch.setattr(one, "attach", lambda scheduler: None)
    monkeypatch.setattr(one, "_stop_stall_detector", lambda: stopped.append("stall detector"))
    monkeypatch.setattr(rank_board, "all_ranks_have", lambda *_: False)
    one.run(lambda scheduler: stopped.append("stock"), SimpleNamespace(tp_group=group(0)))
    assert stopped == ["stall detector", "stock"] and one.scheduler is None
    assert "another rank could not attach; stock SGLang runs" in caplog.text


def test_what_a_rank_did_not_have_once_it_may_have_the_next_time(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreBoard, "of_this_group", lambda attachment: StoreBoard(store, attachment))

    def ask(rank: int) -> list[bool]:
        one: Any = runtime.Runtime()
        one.scheduler = SimpleNamespace(tp_group=group(rank))
        return [one._all_ranks_have("loop", rank == 0 or here) for here in (True, False, True)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == [[True, False, True]] * 2


@pytest.mark.parametrize("others", [True, False])
def test_the_lane_of_one_rank_alone_is_given_up(monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    one: Any = runtime.Runtime()
    one.scheduler = SimpleNamespace(tp_group=group(0))
    one._launcher = SimpleNamespace(port=SimpleNamespace(lane_results="results"))
    monkeypatch.setattr(one, "_build_lane", lambda parts: "lane")
    monkeypatch.setattr(
        rank_board, "all_ranks_have", lambda what, here, group, board, within_s: here and others
    )
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
