"""Whatever was done to the files, the tool ends in one message at worst, and changes all of them or none."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import patch_case
from zos_sglang import __main__ as cli
from zos_sglang.patchset.series import FILE

PATHS = st.sampled_from([*patch_case.FILES, patch_case.NEW])
NAMES = st.sampled_from([*patch_case.PATCHES, FILE])


@st.composite
def damage(draw, content):
    """A file cut, with bytes replaced, emptied, or gone (None)."""
    if draw(st.integers(0, 9)) == 0:
        return None
    at = draw(st.integers(0, len(content)))
    end = draw(st.integers(at, len(content)) | st.just(len(content)))
    return (
        content[:at] + draw(st.binary(max_size=5) | st.sampled_from([b"\n", b"absent", b"0"])) + content[end:]
    )


def put(path: Path, content: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def run(command: str, tree: Path, patches: Path) -> int:
    return cli.main(["patches", command, "--tree", str(tree), "--patches", str(patches)])


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_damaged_tree_or_patch_folder_changes_all_files_or_none(data):
    with tempfile.TemporaryDirectory() as folder:
        tree, patches = patch_case.write(Path(folder))
        clean = patch_case.content(tree)
        applied = data.draw(st.booleans())
        if applied:
            assert run("apply", tree, patches) == 0
        for _ in range(data.draw(st.integers(1, 2))):
            if data.draw(st.booleans()):
                path = tree / data.draw(PATHS)
            else:
                path = patches / f"sglang-{patch_case.RELEASE}" / data.draw(NAMES)
            put(path, data.draw(damage(path.read_bytes() if path.exists() else b"")))
        before = patch_case.content(tree)
        command = data.draw(st.sampled_from(["apply", "revert"]))
        code = run(command, tree, patches)
        after = patch_case.content(tree)
        if code == 2:
            assert after == before
        else:
            assert code == 0
            assert after == (patch_case.patched(clean) if command == "apply" else clean)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["apply", "revert", "check"]), max_size=6))
def test_any_sequence_of_commands_leaves_the_last_ones_state(commands):
    with tempfile.TemporaryDirectory() as folder:
        tree, patches = patch_case.write(Path(folder))
        clean = wanted = patch_case.content(tree)
        for command in commands:
            code = run(command, tree, patches)
            if command != "check":
                wanted = patch_case.patched(clean) if command == "apply" else clean
            assert code == (0 if command != "check" or wanted != clean else 1)
            assert patch_case.content(tree) == wanted
