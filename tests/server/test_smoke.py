"""The smoke suite of the regression: real servers, stock and ours, answer the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zos_sglang.testing.compare import cli

pytestmark = pytest.mark.server
CACHE = Path(__file__).parents[2] / ".cache"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", ["overlap", "resident"])
def test_the_smoke_suite_is_equal_to_stock_with_all_its_evidence(tmp_path: Path, mode: str) -> None:
    out = tmp_path / "smoke.json"
    code = cli.main(["--suite", "smoke", "--mode", mode, "--out", str(out), "--cache", str(CACHE)])
    result = json.loads(out.read_text())
    faults = {s["scenario"]: s["faults"] + s["differences"] for s in result["scenarios"] if not s["equal"]}
    assert (code, faults) == (0, {})
    assert len(result["scenarios"]) >= 6
    assert all(s["requests"] and s["zos"] for s in result["scenarios"])
