"""Servers of several ranks on the CPU; the fixtures are those of tests/server."""

from __future__ import annotations

import pytest

from tests.server.conftest import client_of, distribution, serve, tiny_model
from zos_sglang.testing import rank_jitter

__all__ = ["client_of", "serve", "tiny_model"]

TWO = ("--tp", "2")


@pytest.fixture(scope="session")
def jitter_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lets a server find the plugin `rank_jitter`; its variables say what it does."""
    return distribution(tmp_path_factory.mktemp("jitter"), "rank-jitter", "1.0", rank_jitter.ENTRY)
