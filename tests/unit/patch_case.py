"""A toy SGLang with a patch set of three patches, one file patched twice."""

from __future__ import annotations

import os
from pathlib import Path

from zos_sglang.patchset.series import digest
from zos_sglang.patchset.state import TreeState, choose
from zos_sglang.patchset.tree import find

RELEASE = "1.2.3"
FILES = {
    "sglang/srt/managers/scheduler.py": (
        b"import os\n\n\ndef loop():\n    return 1\n\n\ndef other():\n    pass"
    ),
    "sglang/srt/server.py": b"def serve():\r\n    return 2\r\n",
}
NEW = "sglang/srt/zos_hooks.py"
PATCHES = {
    "0001-new.patch": f"--- /dev/null\n+++ b/{NEW}\n@@ -0,0 +1,2 @@\n+X = 1\n+Y = 2\n".encode(),
    "0002-both.patch": (
        b"--- a/sglang/srt/managers/scheduler.py\n+++ b/sglang/srt/managers/scheduler.py\n"
        b"@@ -1,0 +2 @@\n+import sys\n@@ -5 +6,2 @@\n-    return 1\n+    x = 1\n+    return x\n"
        b"--- a/sglang/srt/server.py\n+++ b/sglang/srt/server.py\n@@ -0,0 +1 @@\n+import sys\r\n"
    ),
    "0003-again.patch": (
        b"--- a/sglang/srt/managers/scheduler.py\n+++ b/sglang/srt/managers/scheduler.py\n"
        b"@@ -10 +10 @@\n-    pass\n\\ No newline at end of file\n+    return 3\n"
    ),
}
AFTER = {
    NEW: [b"X = 1\nY = 2\n"],
    "sglang/srt/managers/scheduler.py": [
        b"import os\nimport sys\n\n\ndef loop():\n    x = 1\n    return x\n\n\ndef other():\n    pass",
        b"import os\nimport sys\n\n\ndef loop():\n    x = 1\n    return x\n\n\ndef other():\n    return 3\n",
    ],
    "sglang/srt/server.py": [b"import sys\r\ndef serve():\r\n    return 2\r\n"],
}
# `pass` is line 9 before the first patch adds two lines.
PATCHES["0003-again.patch"] = PATCHES["0003-again.patch"].replace(b"-10 +10", b"-11 +11")


def series() -> str:
    """The toy's series file."""
    scheduler, server = FILES
    steps = [
        ("0001-new.patch", [(NEW, None, AFTER[NEW][0])]),
        (
            "0002-both.patch",
            [
                (scheduler, FILES[scheduler], AFTER[scheduler][0]),
                (server, FILES[server], AFTER[server][0]),
            ],
        ),
        ("0003-again.patch", [(scheduler, AFTER[scheduler][0], AFTER[scheduler][1])]),
    ]
    lines = ["# toy"]
    for name, files in steps:
        lines.append(name)
        for path, before, after in files:
            lines += [f"  - {digest(before)} {path}", f"  + {digest(after)} {path}"]
    return "\n".join(lines) + "\n"


def write(folder: Path, release: str | None = RELEASE) -> tuple[Path, Path]:
    """The toy and its patches below a folder: the tree and the patch folder."""
    tree, patches = folder / "tree", folder / "patches"
    for path, content in FILES.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    if release is not None:
        (tree / "sglang/_version.py").write_text(f"__version__ = version = '{release}'\n")
    where = patches / f"sglang-{RELEASE}"
    where.mkdir(parents=True)
    (where / "series").write_text(series())
    for name, patch in PATCHES.items():
        (where / name).write_bytes(patch)
    return tree, patches


def look(tree: Path, patches: Path) -> TreeState:
    return choose(find(tree), patches, None)


def content(tree: Path) -> dict[str, bytes]:
    """Every file of the tree, without what the tool keeps for itself."""
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and ".zos_patches" not in path.parts
    }


def patched(before: dict[str, bytes]) -> dict[str, bytes]:
    """What `content` is once everything is applied."""
    return {**before, **{path: states[-1] for path, states in AFTER.items()}}


def rights(path: Path) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_mode, stat.st_mtime_ns
