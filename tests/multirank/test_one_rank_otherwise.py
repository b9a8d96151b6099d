"""A rank that decides otherwise is found out and ends the server; one that loses its lane does not."""

from __future__ import annotations

import re
import time

import httpx
import pytest

from tests.multirank.load import SEED, play
from zos_sglang.testing.rank_jitter import FAULT

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

#: A difference must be found and the server be gone within so many seconds.
BOUND_S = 60
#: SGLang's launcher takes its time for stacks and core dumps before it ends a server.
NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}


@pytest.mark.parametrize(
    ("fault", "mode", "said"),
    [
        ("1:decision:6", "overlap", r"overlap differs: rank 0: '[a-z-]+', rank 1: 'first-token'"),
        # Rank 0 hangs in the forward that rank 1 does not run.
        ("1:selection:3", "resident", r"action differs: rank 0: 'launch', rank 1: 'idle'"),
    ],
)
def test_a_rank_that_decides_otherwise_is_named_and_the_server_ends(start, fault, mode, said):
    client = start(mode, {FAULT: fault, **NO_DUMPS})
    begun = time.monotonic()
    with pytest.raises(httpx.HTTPError):
        for _ in range(50):
            client.wave()
    while client.server.alive and time.monotonic() < begun + BOUND_S:
        time.sleep(0.2)
    assert not client.server.alive, client.server.log_text()[-4000:]
    told = re.findall(r"zos-sglang: .*ranks decided differently at decision \d+ .*", client.server.log_text())
    assert told and re.search(said, told[0]), told


def test_a_lane_that_fails_in_one_rank_is_closed_there_and_the_ranks_go_on_together(start):
    """Unchecked, for the check would stop this server: the ranks' ways differ, and their launches do not."""
    client = start("resident", {FAULT: "1:lane:4", "ZOS_CHECK_RANKS": "0"})
    client.set_state(zos_mode="stock")
    stock = play(client.server.url, SEED)
    client.set_state(zos_mode="resident")
    assert play(client.server.url, SEED) == stock
    assert "the resident lane could not open; it stays closed" in client.server.log_text()
    lane = client.zos()["lane"]  # rank 0's; rank 1 has none
    assert lane["opened"] + lane["rows_left"] > 4 and lane["faults"] == 0
