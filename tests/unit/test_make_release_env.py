"""The requirements of a release's own environment."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_release_env.py"
kept = runpy.run_path(str(SCRIPT))["kept"]


def test_requirements_of_extras_and_named_packages_are_left_out_and_no_others():
    stated = [
        "torch==2",
        "torch_memory_saver>=0.1",
        "Cuda_Tile==1.6.0rc5",
        "x; extra == 'dev'",
        "y<3; python_version>'3'",
    ]
    assert kept(stated, ["cuda-tile", "torch"]) == ["torch_memory_saver>=0.1", "y<3; python_version>'3'"]
