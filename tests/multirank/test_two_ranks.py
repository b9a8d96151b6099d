"""Two ranks, as different as delays and garbage collection make them, decide alike, or are found out."""

from __future__ import annotations

import re
import time

import httpx
import pytest

from tests.multirank.conftest import TWO
from tests.multirank.load import REQUESTS, play
from tests.server.conftest import STRICT
from zos_sglang.testing.rank_jitter import FAULT, JITTER, MILLISECONDS

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

#: A pool that overflows while it decodes, and chunks of long prompts.
TIGHT = (
    *("--max-total-tokens", "700", "--max-running-requests", "24", "--schedule-conservativeness", "0.1"),
    *("--chunked-prefill-size", "64"),
)
CHECK = {"ZOS_CHECK_RANKS": "4", "ZOS_DEBUG_FUTURE_MAP": "1", **STRICT}
SEED = 5
#: A difference must be found and the server be gone within so many seconds.
BOUND_S = 40


@pytest.fixture(scope="module")
def start(serve, client_of, jitter_env):
    """Start two ranks that are compared; returns a user of theirs."""
    return lambda mode, env: client_of(serve(mode, {**CHECK, **jitter_env, **env}, (*TWO, *TIGHT)))


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
    deadline = time.monotonic() + 20
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
    rode = after["lane"]["steps"] - before["lane"]["steps"]
    assert rode > 30 if mode == "resident" else rode == 0
    assert after["lane"]["faults"] == after["paths"]["fallbacks"] == 0


def test_a_lane_that_fails_in_one_rank_is_closed_there_and_the_ranks_go_on_together(start, stock):
    """Unchecked, for the check would stop this server: the ranks' ways differ, and their launches do not."""
    client = start("resident", {FAULT: "1:lane:4", "ZOS_CHECK_RANKS": "0"})
    assert play(client.server.url, SEED) == stock
    assert "the resident lane could not open; it stays closed" in client.server.log_text()
    state = client.zos()
    assert state["lane"]["opened"] > 4 and state["lane"]["faults"] == 0  # rank 0's lane; rank 1 has none


@pytest.mark.parametrize(
    ("fault", "mode", "said"),
    [
        ("1:decision:6", "overlap", r"overlap differs: rank 0: '[a-z-]+', rank 1: 'first-token'"),
        # Rank 0 hangs in the forward that rank 1 does not run.
        ("1:selection:6", "resident", r"action differs: rank 0: 'launch', rank 1: 'idle'"),
    ],
)
def test_a_rank_that_decides_otherwise_is_named_and_the_server_ends(start, fault, mode, said):
    client = start(mode, {FAULT: fault})
    begun = time.monotonic()
    with pytest.raises(httpx.HTTPError):
        for _ in range(50):
            client.wave()
    while client.server.alive and time.monotonic() < begun + BOUND_S:
        time.sleep(0.2)
    assert not client.server.alive, client.server.log_text()[-4000:]
    told = re.findall(r"zos-sglang: .*ranks decided differently at decision \d+ .*", client.server.log_text())
    assert told and re.search(said, told[0]), told
