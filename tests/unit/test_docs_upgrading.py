"""docs/upgrading.md and patches/README.md name commands, files and targets that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from zos_sglang.cli import _parser
from zos_sglang.upstream import releases
from zos_sglang.upstream.hooks import HOOKS

ROOT = Path(__file__).parents[2]
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/upgrading.md", "patches/README.md")
}
TEXT = "\n".join(PAGES.values())
COMMANDS = sorted(set(re.findall(r"python -m zos_sglang (patches[^`#\n]*)", TEXT)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command):
    assert _parser().parse_args(shlex.split(command)).command == "patches"


def test_every_make_target_and_script_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make ([a-z]+(?:-[a-z]+)*) +#", TEXT)) <= set(targets)
    scripts = set(re.findall(r"scripts/\w+\.py", TEXT))
    assert scripts and all((ROOT / script).is_file() for script in scripts)


def test_every_file_of_the_layer_exists():
    named = set(re.findall(r"`(?:zos_sglang/upstream/)?(\w+\.py)`", PAGES["docs/upgrading.md"]))
    here = {path.name for path in (ROOT / "zos_sglang").rglob("*.py")}
    assert named - here - {"scheduler.py", "setup.py"} == set()
    assert hasattr(releases, "captured_decode_was_read")


def test_the_table_for_0_5_21_names_hooks():
    rows = re.findall(r"^\| `(\w+)` \| ", PAGES["docs/upgrading.md"], re.M)
    same, of = map(
        int, re.findall(r"^(\d+) of (\d+) callables are the same", PAGES["docs/upgrading.md"], re.M)[0]
    )
    assert (of, len(rows)) == (len(HOOKS), len(HOOKS) - same)
    assert set(rows) <= {hook.target.rsplit(".", 1)[1] for hook in HOOKS}
