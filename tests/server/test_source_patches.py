"""The source patches, on a scratch copy of the installed SGLang: applied, run, and taken out again.

`make patches-check` runs this file.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zos_sglang.__main__ import main
from zos_sglang.patchset import fetch
from zos_sglang.testing.server import PLATFORM, cpu_env

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]


def link_or_copy(source: str, target: str) -> None:
    """A second name: the package is large, and patching never writes into a file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def hashes(package: Path) -> dict[str, str]:
    """Every Python file of a package."""
    return {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in package.rglob("*.py")
    }


def patches(command: str, tree: Path) -> int:
    return main(["patches", command, "--tree", str(tree)])


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a patched copy of the installed SGLang."""
    here = fetch.installed()
    assert here is not None
    root = tmp_path_factory.mktemp("patched")
    shutil.copytree(here.package, root / "sglang", copy_function=link_or_copy)
    assert patches("check", root) == 1
    assert patches("apply", root) == 0
    assert patches("check", root) == 0
    return root


@pytest.fixture
def env(patched: Path) -> dict[str, str]:
    """What makes a process import the patched copy."""
    return {"PYTHONPATH": os.pathsep.join([str(patched), cpu_env()["PYTHONPATH"]])}


@pytest.mark.timeout(1500)
def test_with_the_entry_point_disabled_a_patched_server_passes_smoke(env, tiny_model):
    """The reference is patched too, without ZOS_MODE: there the decorators pass every call on."""
    command = [sys.executable, str(ROOT / "scripts" / "compare_stock.py"), "--suite", "smoke"]
    command += ["--model", str(tiny_model)]
    # Of this package's two entry points SGLang loads the platform for the CPU, and not the plugin.
    env |= {"SGLANG_PLUGINS": PLATFORM, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_beside_the_entry_point_the_hooks_are_not_applied_twice(env, serve, client_of):
    client = client_of(serve("overlap", env))
    answers = client.wave(8)
    assert client.zos()["reasons"]["overlapped"] > 0
    assert "Applied 1 hook(s) to sglang.srt.managers.scheduler" not in client.server.log_text()
    assert client.set_state(zos_mode="nonsense").status_code == 400
    for mode in ("stock", "off"):
        assert client.set_state(zos_mode=mode).json() == [True]
        assert client.wave(8) == answers
    assert client.zos() is None


def test_the_hook_table_of_a_patched_sglang_says_in_source(env):
    command = [sys.executable, "-m", "zos_sglang", "patches"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    assert "ready" not in done.stdout.split()
    assert "in source (this SGLang was built with zos-sglang's patches)" in done.stdout


def test_reverted_the_copy_holds_the_installed_files_again(patched):
    here = fetch.installed()
    assert here is not None
    installed = hashes(here.package)
    assert hashes(patched / "sglang") != installed
    assert patches("revert", patched) == 0
    assert hashes(patched / "sglang") == installed
