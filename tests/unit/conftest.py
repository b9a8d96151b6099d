"""What unit tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# A busy machine is no failure, and what is tried is the same in every run: what passed here passes in CI.
# HYPOTHESIS_PROFILE=search tries other inputs each time.
_PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("search", derandomize=False, **_PATIENT)
hypothesis.settings.register_profile("same", derandomize=True, **_PATIENT)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A ZOS_* variable of the developer's shell must not decide a test."""
    for name in [n for n in os.environ if n.startswith("ZOS_")]:
        monkeypatch.delenv(name)
    yield


@pytest.fixture
def published() -> Iterator[Any]:
    """SGLang's runtime context of a plain CPU server, for the length of one test."""
    from sglang.srt.runtime_context import use_context

    from tests.unit.upstream_context import plain_context

    with use_context(plain_context()) as context:
        yield context
