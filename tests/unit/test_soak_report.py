"""What makes a soak fail: each of these alone."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from zos_sglang.testing.soak.disturb import MODES
from zos_sglang.testing.soak.judge import Tally
from zos_sglang.testing.soak.report import print_report, report_of
from zos_sglang.testing.soak.run import Settings
from zos_sglang.testing.soak.watch import Process, Sample

KINDS = ("switch", "flush")


def sample(minute: float, rss: float = 100.0, fds: int = 10) -> Sample:
    return Sample(minute, {"scheduler": Process(rss, fds, 4)}, 0, 0, 0)


def soak(**changes: Any) -> Any:
    """A soak of eight minutes without a fault, but for the changes."""
    tally = Tally(requests=900, output_tokens=9000, retractions=3)
    tally.outcomes = Counter({"finished": 800, "aborted": 50, "hung up": 50})
    given = {
        "tally": tally,
        "samples": [sample(minute) for minute in range(9)],
        "zos": {"lane": {"faults": 0, "steps": 400, "share": 0.8}, "paths": {"fallbacks": 0}},
        "disturber": SimpleNamespace(done=Counter(dict.fromkeys(KINDS, 2)), kinds=KINDS, seconds=Counter()),
        "settings": Settings(minutes=8, modes=MODES),
        "server": SimpleNamespace(alive=True, log_text=lambda: "all is well"),
    }
    return SimpleNamespace(**{**given, **changes})


def failed(run: Any) -> list[str]:
    found = report_of(run)
    names = [check["what"] for check in found["checks"] if not check["ok"]]
    assert found["passed"] == (not names)
    return names


def test_a_soak_without_a_fault_passes(capsys):
    assert failed(soak()) == []
    print_report(report_of(soak()))
    assert capsys.readouterr().out.rstrip().endswith("PASS")


def wrong() -> Tally:
    tally = soak().tally
    tally.fault("soak-0-1: token 3 of 9 is 4, not that of stock")
    return tally


def never_aborted() -> Tally:
    tally = soak().tally
    del tally.outcomes["aborted"]
    return tally


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tally": wrong()}, "as it must be"),
        ({"tally": never_aborted()}, "all of it happened"),
        ({"server": SimpleNamespace(alive=False, log_text=str)}, "lived"),
        ({"server": SimpleNamespace(alive=True, log_text=lambda: "token_to_kv_pool memory leak")}, "log"),
        ({"zos": {"lane": {"faults": 1, "steps": 9}, "paths": {"fallbacks": 0}}}, "no fault of ours"),
        ({"zos": {"lane": {"faults": 0, "steps": 0}, "paths": {"fallbacks": 0}}}, "rode the lane"),
        ({"samples": [sample(minute, rss=100 + 3 * minute) for minute in range(9)]}, "rss_mb_per_minute"),
        ({"samples": [sample(minute, fds=10 + 2 * minute) for minute in range(9)]}, "fds_per_minute"),
    ],
)
def test_each_fault_alone_fails_it(changes, word):
    found = failed(soak(**changes))
    assert len(found) == 1 and word in found[0]


def test_an_hour_may_grow_less_than_ten_minutes():
    slow = [sample(minute, rss=100 + minute) for minute in range(41)]
    assert failed(soak(samples=slow[:9])) == []
    assert failed(soak(samples=slow)) == ["rss_mb_per_minute at most 0.5"]


def test_faults_that_were_asked_for_are_counted_and_do_not_fail_it():
    zos = {"lane": {"faults": 2, "steps": 9, "share": 0.1}, "paths": {"fallbacks": 1}}
    run = soak(zos=zos, settings=Settings(minutes=8, faults=True))
    assert failed(run) == [] and report_of(run)["faults_survived"] == 3
