"""The lane's intake in two halves: together they are upstream's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_parallel

from tests.unit.lane_standins import port_over

pytestmark = pytest.mark.usefixtures("published")


class Intake:
    """What upstream's intake touches of a scheduler; `log` says what was done, in order."""

    def __init__(self, arrivals: list[list[str]], timeouts: list[list[str]], deferred: list[str]) -> None:
        self.log: list[tuple[str, Any]] = []
        self.arrivals, self.timeouts = list(arrivals), list(timeouts)
        self._deferred_input_requests = list(deferred)
        self.request_receiver = SimpleNamespace(recv_requests=self._receive)
        self.metrics_reporter = SimpleNamespace(
            record_scheduler_active=lambda since: self.log.append(("active", since > 0))
        )

    def _poll_timeout_aborts(self) -> list[str]:
        found = self.timeouts.pop(0) if self.timeouts else []
        self.log.append(("polled", found))
        return found

    def _receive(self, local_reqs: list[str]) -> list[str]:
        self.log.append(("received with", list(local_reqs)))
        return [*local_reqs, *(self.arrivals.pop(0) if self.arrivals else [])]

    def process_input_requests(self, requests: list[str]) -> None:
        self.log.append(("processed", list(requests)))


names = st.lists(st.text("abc", min_size=1, max_size=2), max_size=3)


@given(
    st.lists(names, max_size=5), st.lists(names, max_size=5), names, st.sampled_from(["first", "tp", "cp"])
)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_two_halves_are_upstreams_intake(
    arrivals: list[list[str]], timeouts: list[list[str]], deferred: list[str], rank: str
) -> None:
    """Same calls, same order, nothing lost; timeouts are polled by the first rank and if nothing waits."""
    whole, halves = (Intake(arrivals, timeouts, deferred) for _ in range(2))
    port = port_over(halves)
    elsewhere = {"tp_size": 2, "tp_rank": 1}
    ranks: dict[str, dict[str, int]] = {
        "first": {},
        "tp": {**elsewhere, "attn_tp_size": 2, "attn_tp_rank": 1, "moe_tp_size": 2},
        "cp": {**elsewhere, "attn_cp_size": 2, "attn_cp_rank": 1, "moe_tp_size": 2},
    }
    with get_parallel().override(**ranks[rank]):
        for tick in range(len(arrivals) + 2):
            taken = Scheduler.ingest_requests(whole)
            assert port.receive() is bool(taken), tick
            port.dispatch()
            assert halves.log == whole.log
            assert halves._deferred_input_requests == whole._deferred_input_requests == []
    assert ("polled" in [what for what, _ in halves.log]) is (rank == "first")


def test_what_was_received_waits_for_its_dispatch() -> None:
    scheduler = Intake([["a"], ["b"], []], [["late"], ["not polled"]], [])
    port = port_over(scheduler)
    assert port.receive() and port.receive()
    assert scheduler._deferred_input_requests == ["late", "a", "b"]
    assert [what for what, _ in scheduler.log] == ["polled", "received with", "received with"]
    port.dispatch()
    assert scheduler.log[-1] == ("processed", ["late", "a", "b"])
    assert port.receive()
    port.dispatch()
    assert scheduler.log[-1] == ("processed", ["not polled"])
    assert not port.receive()


def test_requests_that_a_failing_dispatch_did_not_see_are_not_dispatched_twice() -> None:
    """As in upstream: they are taken off the list first."""
    scheduler: Any = Intake([["a"]], [], [])
    port = port_over(scheduler)
    port.receive()
    scheduler.process_input_requests = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        port.dispatch()
    assert scheduler._deferred_input_requests == []
