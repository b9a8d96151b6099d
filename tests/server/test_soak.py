"""Ten minutes of load and disturbance on one server (`ZOS_SOAK_MINUTES`; 0 leaves it out)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zos_sglang.testing.soak import cli

# Taken out of the environment: it is no setting of the plugin, which would name it unknown.
MINUTES = float(os.environ.pop("ZOS_SOAK_MINUTES", "10"))
CACHE = Path(__file__).parents[2] / ".cache"

pytestmark = [pytest.mark.server, pytest.mark.soak, pytest.mark.timeout(MINUTES * 60 + 600)]


@pytest.mark.skipif(not MINUTES, reason="ZOS_SOAK_MINUTES=0")
def test_a_server_lives_through_a_soak_with_every_answer_as_it_must_be(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    code = cli.main(["--minutes", str(MINUTES), "--out", str(out), "--cache", str(CACHE)])
    found = json.loads(out.read_text())
    assert [check for check in found["checks"] if not check["ok"]] == [], found["wrong"]
    assert code == 0 and found["requests"] > 100 * MINUTES
