"""The patch sets and the table of hooks say the same, in both directions, for every release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zos_sglang.patchset import fetch
from zos_sglang.patchset.cli import FOLDER
from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.make import IMPORT, Decorated, make
from zos_sglang.patchset.series import load, releases
from zos_sglang.patchset.source import locate
from zos_sglang.upstream.hooks import HOOKS
from zos_sglang.upstream.versions import SUPPORTED, installed

DECORATOR = re.compile(r'\s*@zos_hook\("(\w+)", "([\w.]+)"\)\n')
README = (FOLDER / "README.md").read_text(encoding="utf-8")
APPLIED = [Decorated(h.target, h.kind, h.replacement) for h in HOOKS if h.kind != "mirror"]
MODULE = (FOLDER / "zos_hooks.py").read_text(encoding="utf-8")


def added(release: str) -> list[str]:
    """Every line that a release's patches add, and nothing else may be in them."""
    lines = []
    for target in load(FOLDER, release).targets:
        for step in target.steps:
            for hunk in step.patch.hunks:
                assert hunk.old == (), f"{step.name} takes out lines of {target.path}"
                lines += [line.decode() for line in hunk.new]
    return lines


def test_every_supported_release_has_a_patch_set_and_no_other_has():
    assert releases(FOLDER) == SUPPORTED


@pytest.mark.parametrize("release", SUPPORTED)
def test_every_hook_has_one_decorator_and_every_decorator_a_hook(release):
    """A mirrored callable has none: our code does its work, so a decorator would do it twice."""
    found = [m.groups() for line in added(release) if (m := DECORATOR.fullmatch(line))]
    assert sorted(found) == sorted((h.kind, h.replacement) for h in APPLIED)
    mirrored = {h.replacement for h in HOOKS if h.kind == "mirror"}
    assert not mirrored & {replacement for _, replacement in found}


@pytest.mark.parametrize("release", SUPPORTED)
def test_the_patches_add_decorators_one_import_a_file_and_one_file_of_ours_and_nothing_else(release):
    others = [line for line in added(release) if not DECORATOR.fullmatch(line)]
    changed = [t for t in load(FOLDER, release).targets if not t.steps[0].patch.creates]
    assert others.count(f"{IMPORT}\n") == len(changed)
    assert "".join(line for line in others if line != f"{IMPORT}\n") == MODULE


@pytest.mark.parametrize("release", SUPPORTED)
def test_every_patch_has_an_entry_in_the_readme_and_every_entry_a_patch(release):
    entries = re.findall(r"^### (\S+)$", README, re.M)
    assert sorted(name[5:-6] for name in load(FOLDER, release).names) == sorted(entries)
    for entry in re.split(r"^### ", README, flags=re.M)[1:]:
        words = re.findall(r"^- \*\*(.+?):\*\* \S", entry, re.M)
        assert words == ["Target", "Why", "How", "Related upstream change", "Drop it when"]


def test_the_readme_names_every_hooked_function():
    assert [h.target for h in APPLIED if h.target.rsplit(".", 1)[1] not in README] == []


def test_the_patches_are_what_the_table_makes_of_the_installed_release():
    here = fetch.installed()
    assert here is not None and installed() == here.release
    made = make(here.root, APPLIED, MODULE)
    folder = FOLDER / f"sglang-{here.release}"
    assert {p.name: p.read_text() for p in folder.iterdir()} == made


def test_a_decorator_stands_on_the_function_that_the_hook_names(tmp_path):
    """In the patched text, found by its name again."""
    here = fetch.installed()
    assert here is not None and here.release is not None
    for target in load(FOLDER, here.release).targets:
        before = here.root / target.path
        after = tmp_path / target.path
        after.parent.mkdir(parents=True, exist_ok=True)
        after.write_bytes(target.forward(before.read_bytes() if before.exists() else None))
    for hook in APPLIED:
        found = locate(tmp_path, hook.target)
        assert found is not None
        first = (tmp_path / found.path).read_text().split("\n")[found.first_line - 1]
        assert first.strip() == f'@zos_hook("{hook.kind}", "{hook.replacement}")'


def test_a_hook_whose_target_is_gone_makes_no_patches():
    here = fetch.installed()
    assert here is not None
    with pytest.raises(PatchError, match=r"Scheduler\.gone: not in"):
        make(here.root, [Decorated("sglang.srt.managers.scheduler.Scheduler.gone", "around", "x.y")], MODULE)


# ---------------------------------------------------------------- the module that the patches add


@pytest.fixture
def zos_hook(monkeypatch):
    """`hook` of the added module, as a patched SGLang has it."""
    scope: dict = {}
    exec(compile(MODULE, str(Path("zos_hooks.py")), "exec"), scope)
    return scope["hook"]


def test_without_zos_mode_a_decorated_function_is_itself(zos_hook, monkeypatch):
    monkeypatch.delenv("ZOS_MODE", raising=False)
    assert zos_hook("around", "no.such.module")(lambda x: x + 1)(1) == 2


def test_without_the_package_a_decorated_function_is_itself(zos_hook, monkeypatch):
    monkeypatch.setenv("ZOS_MODE", "overlap")
    monkeypatch.setitem(__import__("sys").modules, "zos_sglang.plugin", None)
    assert zos_hook("around", "zos_sglang.upstream.entry.around_run_event_loop")(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize(
    ("kind", "call", "result"),
    [
        ("around", lambda original, x: original(x) * 10, 20),
        ("after", lambda result, x: None, 2),
        ("after", lambda result, x: result * 10, 20),
        ("before", lambda x: None, 2),
    ],
)
def test_a_hook_is_called_as_its_kind_says(zos_hook, monkeypatch, kind, call, result):
    import zos_sglang.plugin

    monkeypatch.setenv("ZOS_MODE", "overlap")
    monkeypatch.setattr(zos_sglang.plugin, "from_source", lambda path: call)
    decorated = zos_hook(kind, "zos_sglang.x.y")(lambda x: x + 1)
    assert decorated(1) == result
    assert decorated.__zos_hook__ == "zos_sglang.x.y"
