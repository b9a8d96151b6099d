"""SGLANG_FORCE_STREAM_INTERVAL reaches the lane: what a quiet request reports decides its trimmed text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.lane_fakes import LaneRequest, LaneSpec
from tests.unit.lane_standins import plain_scheduler, port_over
from zos_sglang.upstream import lane_port


@pytest.mark.parametrize("interval", [1, 7, 50])
def test_a_row_is_due_at_the_interval_that_upstreams_streamer_uses(
    interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_port, "DEFAULT_FORCE_STREAM_INTERVAL", interval)
    batch = SimpleNamespace(reqs=[LaneRequest(LaneSpec(0, (1, 2), max_new=200))])
    table = port_over(plain_scheduler()).table(batch, None)
    assert [n for n in range(1, 101) if table.due(n)] == list(range(interval, 101, interval))
