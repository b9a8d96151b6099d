"""Two ranks, as different as delays and garbage collection make them, decide alike and answer as stock."""

from __future__ import annotations

import time

import pytest

from tests.multirank.load import REQUESTS, SEED, play
from zos_sglang.testing.rank_jitter import COLLECTED, HELD_UP, JITTER, MILLISECONDS, PLACES, TOLD

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def jittery(start):
    """Both ranks are held up, each at times of its own."""
    return start("resident", {JITTER: "0:3,1:7", MILLISECONDS: "20"})


@pytest.fixture(scope="module")
def stock(jittery):
    """Answers of SGLang's own loop on the same ranks."""
    jittery.set_state(zos_mode="stock")
    return play(jittery.server.url, SEED)


def agreed(client, more_than):
    """The block `ranks` once everything decided is compared."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        block = client.zos()["ranks"]
        if block["agreed"] > more_than and block["decisions"] - block["agreed"] < 2 * block["every"]:
            return block
        time.sleep(0.3)
    raise AssertionError(f"not compared in time: {block}")


@pytest.mark.parametrize("mode", ["overlap", "resident"])
def test_jittery_ranks_decide_alike_and_answer_as_stock_does(jittery, stock, mode):
    jittery.set_state(zos_mode=mode)
    before, retracted = jittery.zos(), jittery.server.log_text().count("Retract requests")
    assert play(jittery.server.url, SEED) == stock and len(stock) == REQUESTS * 5 // 6
    block, after = agreed(jittery, before["ranks"]["agreed"] + 100), jittery.zos()
    assert block["sound"] and block["differences"] == 0 and block["blocks"] > before["ranks"]["blocks"] + 20
    assert jittery.server.log_text().count("Retract requests") > retracted
    rode, left = (after["lane"][name] - before["lane"][name] for name in ("steps", "rows_left"))
    assert rode > 30 and left > 0 if mode == "resident" else rode == left == 0
    assert after["lane"]["faults"] == after["paths"]["fallbacks"] == 0


def test_both_ranks_were_held_up_at_every_place_and_collected_their_garbage(jittery, stock):
    """Behind the tests above, whose delays these are."""
    log = jittery.server.log_text()
    for rank in ("TP0]", "TP1]"):
        told = {line.partition(rank)[2].strip() for line in log.splitlines() if rank in line}
        assert {TOLD.format(what=HELD_UP, place=place) for place in PLACES} <= told
        assert any(line.startswith(f"rank_jitter: {COLLECTED}") for line in told)
