"""With tracing on, a step of the lane is stamped as scheduled, as upstream stamps a decode step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.observability import req_time_stats

from tests.unit.lane_standins import plain_scheduler, port_over


class Stats:
    def __init__(self) -> None:
        self.stamps: list[Any] = []

    def set_last_scheduled_time(self, mode: Any, ts: float, attrs: Any) -> None:
        self.stamps.append((attrs["forward_mode"], attrs["batch_size"]))


@pytest.mark.parametrize(("traced", "wanted"), [(False, []), (True, [("decode", 1)] * 2)])
def test_every_step_of_the_lane_is_stamped_when_requests_are_traced(
    traced: bool, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(req_time_stats, "get_global_tracing_enabled", lambda: traced)
    scheduler = plain_scheduler()
    stats = Stats()
    scheduler.new_token_ratio_tracker = SimpleNamespace(decay_step=lambda: None)
    scheduler.running_batch.reqs = [SimpleNamespace(time_stats=stats)]
    port = port_over(scheduler)
    for _ in range(2):
        port.selected_again()
    assert stats.stamps == wanted
