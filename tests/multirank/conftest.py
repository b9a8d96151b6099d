"""Servers of several ranks on the CPU; the fixtures are those of tests/server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.conftest import STRICT, Client, ServerProcess, client_of, serve, tiny_model
from zos_sglang.testing import rank_jitter
from zos_sglang.testing.distribution import distribution

__all__ = ["client_of", "serve", "tiny_model"]

#: Two ranks; a pool that overflows while it decodes; chunks of long prompts.
TWO = (
    *("--tp", "2", "--max-total-tokens", "700", "--max-running-requests", "24"),
    *("--schedule-conservativeness", "0.1", "--chunked-prefill-size", "64"),
)
CHECK = {
    "ZOS_CHECK_RANKS": "4",
    "ZOS_DEBUG_FUTURE_MAP": "1",
    # Admission counts on short answers, so that the pool overflows however fast the machine is.
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
    **STRICT,
}


@pytest.fixture(scope="session")
def jitter_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lets a server find the plugin `rank_jitter`; its variables say what it does."""
    return distribution(tmp_path_factory.mktemp("jitter"), "rank-jitter", "1.0", rank_jitter.ENTRY)


@pytest.fixture(scope="module")
def start(serve: Callable[..., ServerProcess], jitter_env: dict[str, str]) -> Callable[..., Client]:
    """Start two ranks that are compared, in a mode and with variables; returns a user of theirs."""
    return lambda mode, env: Client(serve(mode, {**CHECK, **jitter_env, **env}, TWO))
