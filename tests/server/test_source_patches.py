"""The source patches apply to the installed SGLang, and a server built with them runs our loop."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from zos_sglang.testing.server import cpu_env
from zos_sglang.upstream.versions import installed

pytestmark = pytest.mark.server

PATCHES = sorted((Path(__file__).parents[2] / "patches" / f"sglang-{installed()}").glob("*.patch"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed SGLang, by links, and real copies of the patched files."""
    root = tmp_path_factory.mktemp("patched")
    package = Path(find_spec("sglang").submodule_search_locations[0])
    shutil.copytree(package, root / "sglang", copy_function=os.symlink)
    for patch in PATCHES:
        target = root / patch.read_text().splitlines()[1].split("b/", 1)[1]
        if target.exists():
            real = target.resolve()
            target.unlink()
            shutil.copy(real, target)
        done = subprocess.run(
            ["patch", "-p1", "-d", str(root), "-i", str(patch), "--fuzz=0"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_there_is_a_set_of_patches_for_the_installed_release():
    assert len(PATCHES) == 7


def test_a_patched_server_runs_our_loop_and_says_that_the_hooks_are_in_its_source(patched, serve, client_of):
    env = {"PYTHONPATH": os.pathsep.join([str(patched), cpu_env()["PYTHONPATH"]])}
    client = client_of(serve("overlap", env))
    answers = client.wave(8)
    assert client.zos()["reasons"]["overlapped"] > 0
    assert "Applied 1 hook(s) to sglang.srt.managers.scheduler" not in client.server.log_text()
    assert client.set_state(zos_mode="nonsense").status_code == 400
    for mode in ("stock", "off"):
        assert client.set_state(zos_mode=mode).json() == [True]
        assert client.wave(8) == answers
    assert client.zos() is None


def test_a_patched_server_without_zos_mode_is_stock(patched, serve, client_of):
    env = {"PYTHONPATH": os.pathsep.join([str(patched), cpu_env()["PYTHONPATH"]])}
    client = client_of(serve(None, env))
    assert client.generate("hello", 4)["meta_info"]["completion_tokens"] == 4
    assert client.zos() is None
