"""Order of the whole suite: the soak comes last, when everything else has been seen to work."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("soak") is not None)
