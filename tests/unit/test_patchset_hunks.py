"""Unified diffs are read and applied strictly, and back again."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import patch_case
from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.hunks import parse
from zos_sglang.patchset.make import Insertion, _insert

HEAD = b"--- a/sglang/f.py\n+++ b/sglang/f.py\n"


def one(hunks: bytes):
    return parse(HEAD + hunks, "p")[0]


@pytest.mark.parametrize(
    ("hunks", "before", "after"),
    [
        (b"@@ -0,0 +1 @@\n+new\n", b"a\n", b"new\na\n"),
        (b"@@ -1,0 +2 @@\n+new\n", b"a\n", b"a\nnew\n"),
        (b"@@ -2 +1,0 @@\n-b\n", b"a\nb\nc\n", b"a\nc\n"),
        (b"@@ -1,2 +1 @@\n-a\n-b\n+x\n@@ -4 +3 @@\n-d\n+y\n", b"a\nb\nc\nd\n", b"x\nc\ny\n"),
        (b"@@ -1,3 +1,3 @@ def f\n a\n-b\n+x\n c\n", b"a\nb\nc\n", b"a\nx\nc\n"),
        (b"@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n", b"a", b"b\n"),
        (b"@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n", b"a\n", b"b"),
        (b"@@ -1 +1 @@\n-a\r\n+b\r\n", b"a\r\n", b"b\r\n"),
    ],
)
def test_a_patch_applies_and_comes_off_again(hunks, before, after):
    assert one(hunks).apply(before) == after
    assert one(hunks).unapply(after) == before


@pytest.mark.parametrize("before", [b"a\nx\nc\n", b"b\n", b"", b"a\nb", b"\na\nb\n"])
def test_a_line_that_is_not_the_replaced_one_is_refused(before):
    with pytest.raises(PatchError, match=r"sglang/f\.py: line 2 is not what the patch replaces"):
        one(b"@@ -2 +2 @@\n-b\n+y\n").apply(before)


def test_a_hunk_whose_new_line_number_is_not_where_it_ends_up_is_refused():
    with pytest.raises(PatchError, match="line 2"):
        one(b"@@ -1,0 +7 @@\n+new\n").apply(b"a\n")


def test_a_new_file_is_refused_where_one_stands_and_a_changed_one_where_none_does():
    new = parse(b"--- /dev/null\n+++ b/sglang/f.py\n@@ -0,0 +1 @@\n+a\n", "p")[0]
    assert new.apply(None) == b"a\n" and new.unapply(b"a\n") is None
    with pytest.raises(PatchError, match="there is a file already"):
        new.apply(b"")
    with pytest.raises(PatchError, match="no such file"):
        one(b"@@ -1,0 +2 @@\n+new\n").apply(None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"hello\n",
        b"--- a/sglang/f.py\n",
        HEAD,
        HEAD + b"@@ -1 +1\n",
        HEAD + b"@@ -1,2 +1 @@\n-a\n+b\n",
        HEAD + b"@@ -1 +1,0 @@\n+a\n-b\n",
        HEAD + b"@@ -1 +1 @@\n-a\n+b",
        HEAD + b"@@ -1 +1 @@\n-a\n+b\n" + HEAD + b"@@ -1 +1 @@\n-b\n+c\n",
        HEAD.replace(b"sglang/", b"../sglang/") + b"@@ -1 +1 @@\n-a\n+b\n",
        HEAD.replace(b"sglang/", b"sglang/../../") + b"@@ -1 +1 @@\n-a\n+b\n",
        b"--- a/sglang/f.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n",
        b"--- a/sglang/f.py\n+++ b/sglang/g.py\n@@ -1 +1 @@\n-a\n+b\n",
        b"--- a/sglang/\xff.py\n+++ b/sglang/\xff.py\n@@ -1 +1 @@\n-a\n+b\n",
    ],
)
def test_what_is_no_patch_below_sglang_is_refused(text):
    with pytest.raises(PatchError, match=r"^p: "):
        parse(text, "p")


LINES = st.lists(st.sampled_from([b"a", b"b", b"", b"  c"]), max_size=12)


@given(LINES, st.sets(st.integers(0, 12), min_size=1, max_size=4))
def test_made_patches_hold_no_line_of_the_file_and_do_what_gnu_patch_does(tmp_path_factory, lines, places):
    """Only added lines, and `patch -p1` agrees with us on the result."""
    before = b"".join(line + b"\n" for line in lines) or b"one\n"
    count = before.count(b"\n")
    insertions = [Insertion(min(p, count), f"put {p}") for p in sorted(places)]
    if len({i.after for i in insertions}) < len(insertions):
        insertions = insertions[:1]
    text, after = _insert("sglang/f.py", before, insertions)
    assert all(line[:1] in "+@-" for line in text.splitlines())
    assert not any(line.startswith("-") for line in text.splitlines()[2:])
    made = parse(text.encode(), "p")[0]
    assert made.apply(before) == after and made.unapply(after) == before
    folder = tmp_path_factory.mktemp("patch")
    (folder / "sglang").mkdir()
    (folder / "sglang/f.py").write_bytes(before)
    command = ["patch", "-p1", "--fuzz=0", "-s", "-d", str(folder)]
    subprocess.run(command, input=text.encode(), check=True, capture_output=True)
    assert (folder / "sglang/f.py").read_bytes() == after


@given(st.data())
def test_a_damaged_patch_is_refused_or_still_a_patch(data):
    """Cut, changed or doubled bytes end in PatchError at worst."""
    text = data.draw(st.sampled_from(list(patch_case.PATCHES.values())))
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, len(text)))
    put = data.draw(st.binary(max_size=6) | st.sampled_from([b"\n", b"+", b"@@ -1 +1 @@\n", b"-1"]))
    try:
        for patch in parse(text[:at] + put + text[end:], "p"):
            assert patch.path.startswith("sglang/") and ".." not in patch.path
            patch.apply(patch_case.FILES.get(patch.path))
    except PatchError as error:
        assert "\n" not in str(error)
