"""The overlap loop on a CUDA device: the parts of scripts/gpu_check.py, each one test.

Step time is judged by scripts/gpu_check.py on a machine of its own, not here: a test must not fail
because another process used the device.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zos_sglang.testing.bench import canary
from zos_sglang.testing.bench.gpu import PARTS, Scale
from zos_sglang.testing.bench.gpu_cli import run_part
from zos_sglang.testing.server import cuda_available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="no CUDA device"),
]
SCALE = Scale(repeats=1, canary=canary.Load(tokens=50_000))


@pytest.mark.parametrize("name", [name for name in PARTS if not name.endswith("spin")])
def test_part_holds(name: str, tmp_path: Path) -> None:
    failed = [check for check in run_part(name, tmp_path, SCALE) if not check.ok]
    assert [check for check in failed if "times stock's" not in check.what] == []
