"""The decode adapter over upstream's own runner, batch and sampler; see `upstream_decode_case`."""

from __future__ import annotations

import subprocess
import sys


def test_adapter_over_upstreams_own_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.upstream_decode_case"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
