"""Order of the whole suite (the soak comes last, when all else has been seen to work), and its limits."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest
from pytest_timeout import get_env_settings

#: Seconds that a test may take which starts no server (those that do: `timeout` in pyproject.toml).
UNIT_S = 400
#: A test that failed by its time-out may still wait for a thread that never ends, and pytest at its own end
#: for any other. So much later the run ends at once, with the stacks of all threads.
LAST_RESORT_S = 180

_stderr = pytest.StashKey[int]()
#: Of the test under way, seconds; 0 for no limit.
_last_resort = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    # While a test runs, what is written to 2 is captured, and would be lost.
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("soak") is not None)
    if _asked_for(config):
        return
    for item in items:
        if not any(map(item.get_closest_marker, ("server", "gpu", "timeout"))):
            item.add_marker(pytest.mark.timeout(UNIT_S))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    config = item.config
    limit_s = _limit_s(item)
    watched = limit_s and not (config.getoption("usepdb") or config.getoption("trace"))
    config.stash[_last_resort] = limit_s + LAST_RESORT_S if watched else 0
    _end_after(config.stash[_last_resort], config)
    try:
        return (yield)
    finally:
        # What comes between this test and the next one, or the end, has a limit, too.
        _end_after(LAST_RESORT_S if watched else 0, config)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """A failed test goes on to its teardown, and pytest's own plugin has just cancelled the timer."""
    _end_after(node.config.stash.get(_last_resort, 0), node.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _stderr in config.stash:
        _end_after(LAST_RESORT_S, config)


def _asked_for(config: pytest.Config) -> bool:
    """Whether who started pytest gave a limit, or 0 for none: it then holds for all tests without a mark."""
    return config.getoption("timeout") is not None or "PYTEST_TIMEOUT" in os.environ


def _limit_s(item: pytest.Item) -> float:
    """What pytest-timeout gives the test, in seconds; 0 for no limit."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        found = marker.args[0] if marker.args else marker.kwargs.get("timeout")
        if found is not None:
            return float(found)
    return float(get_env_settings(item.config).timeout or 0)


def _end_after(seconds: float, config: pytest.Config) -> None:
    """End the run then, with all stacks, unless this is called again; 0: never."""
    if not seconds:
        faulthandler.cancel_dump_traceback_later()
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_stderr])
