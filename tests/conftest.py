"""Order of the whole suite (the soak comes last, when all else has been seen to work), and its limits."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest

#: Seconds that a test may take which starts no server (those that do: `timeout` in pyproject.toml).
UNIT_S = 400
#: A test that failed by its time-out may still wait for a thread that never ends, and pytest at its own end
#: for any other. So much later the run ends at once, with the stacks of all threads.
LAST_RESORT_S = 180

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # While a test runs, what is written to 2 is captured, and would be lost.
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("soak") is not None)
    for item in items:
        if not any(map(item.get_closest_marker, ("server", "gpu", "timeout"))):
            item.add_marker(pytest.mark.timeout(UNIT_S))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    if not item.config.getoption("usepdb"):
        _end_after(limit_s + LAST_RESORT_S, item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure(config: pytest.Config) -> None:
    _end_after(LAST_RESORT_S, config)


def _end_after(seconds: float, config: pytest.Config) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_stderr])
