"""What unit tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A ZOS_* variable of the developer's shell must not decide a test."""
    for name in [n for n in os.environ if n.startswith("ZOS_")]:
        monkeypatch.delenv(name)
    yield
