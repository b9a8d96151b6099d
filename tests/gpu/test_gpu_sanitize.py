"""The lane's kernels under compute-sanitizer; `scripts/gpu_sanitize.py` runs the same with its controls."""

from __future__ import annotations

import pytest

from zos_sglang.testing.races.sanitizer import TOOLS, NoSanitizer, find_sanitizer, sanitize
from zos_sglang.testing.server import cuda_available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("tool", TOOLS)
def test_no_kernel_of_the_lane_touches_memory_that_is_not_its_own_or_races(tool: str) -> None:
    try:
        sanitizer = find_sanitizer()
    except NoSanitizer as error:
        pytest.skip(str(error))
    found = sanitize(sanitizer, [tool])
    assert found["ok"], found
