"""`patches diff`: which callables and names another release changed, from sources alone."""

from __future__ import annotations

import json
import zipfile
from types import SimpleNamespace

import pytest

from zos_sglang import __main__ as cli
from zos_sglang.patchset import diff_cli, fetch
from zos_sglang.patchset.diff import compare, lost_names
from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.source import locate
from zos_sglang.upstream.hooks import hooks_of
from zos_sglang.upstream.versions import installed

A = "sglang.srt.a"
BASE = {
    "a.py": (
        "from sglang.srt.b import passed_on\n\nif True:\n    def conditional():\n        return 0\n\n\n"
        "@one\n@two\ndef f(x):\n    return x\n\n\nclass C:\n    def same(self):\n        return 1\n\n"
        "    def changed(self):\n        return self.old_name\n\n    def gone(self):\n        pass\n"
    ),
    "b.py": "def passed_on():\n    return 'b'\n",
}
OTHER = {
    "a.py": (
        "from sglang.srt.b import passed_on\n\nif True:\n    def conditional():\n        return 0\n\n\n"
        "@three\ndef f(x):\n\n    return x   \n\n\nclass C:\n    def same(self):\n        return 1\n\n"
        "    def changed(self, more):\n        return self.new_name\n"
    ),
    "b.py": "def passed_on():\n    return 'b'\n\n\ndef gone():\n    pass\n",
}


def tree(folder, files, release):
    where = folder / release / "sglang"
    for name, text in files.items():
        (where / "srt" / name).parent.mkdir(parents=True, exist_ok=True)
        (where / "srt" / name).write_text(text)
    (where / "_version.py").write_text(f"__version__ = version = '{release}'\n")
    return where.parent


@pytest.fixture
def two(tmp_path):
    return tree(tmp_path, BASE, "1.0.0"), tree(tmp_path, OTHER, "2.0.0")


def status(two, *targets):
    changes = compare(*two, [f"{A}.{t}" for t in targets], ("1.0.0", "2.0.0"))
    return {change.target.removeprefix(f"{A}."): change for change in changes}


def test_decorators_blank_lines_and_trailing_space_are_no_change(two):
    assert status(two, "f")["f"].status == "same"


def test_a_changed_callable_is_shown_with_both_releases(two):
    change = status(two, "C.changed")["C.changed"]
    assert (change.status, change.added, change.removed) == ("changed", 2, 2)
    assert f"--- {A}.C.changed 1.0.0\n+++ {A}.C.changed 2.0.0\n" in change.diff
    assert {"-    return self.old_name", "+    return self.new_name"} <= set(change.diff.splitlines())


def test_a_callable_that_is_gone_is_looked_for_elsewhere(two):
    change = status(two, "C.gone")["C.gone"]
    assert (change.status, change.elsewhere) == ("gone", ("sglang/srt/b.py",))


def test_a_callable_that_only_the_other_release_has_is_new(two):
    assert status(reversed(two), "C.gone")["C.gone"].status == "new"


def test_names_passed_on_and_definitions_under_a_condition_are_found(two):
    assert {c.status for c in status(two, "passed_on", "conditional", "C.same").values()} == {"same"}
    assert locate(two[0], f"{A}.passed_on").path == "sglang/srt/b.py"


def test_every_hook_is_found_in_the_source_of_the_installed_release():
    here = fetch.installed()
    assert here is not None
    assert [h.target for h in hooks_of(installed()) if locate(here.root, h.target) is None] == []


def test_a_name_that_we_use_and_the_other_release_lost_is_told_with_our_file(two, tmp_path):
    ours = tmp_path / "package" / "upstream"
    ours.mkdir(parents=True)
    (ours / "port.py").write_text(
        "class Mine:\n    pass\n\ndef use(x):\n    x.old_name\n    x.nowhere\n    return Mine\n"
    )
    assert lost_names(*two, ours) == {"old_name": ("upstream/port.py",)}


def run(*arguments):
    return cli.main(["patches", "diff", *map(str, arguments)])


@pytest.fixture
def toy_hooks(monkeypatch, two):
    """The command on the toy: its base is 1.0.0, its hooks are those of the toy."""
    from zos_sglang.upstream import hooks

    table = tuple(SimpleNamespace(target=f"{A}.{name}") for name in ("f", "C.changed", "C.gone"))
    monkeypatch.setattr(hooks, "HOOKS", table)
    monkeypatch.setattr(diff_cli, "_base", lambda release: fetch.find(two[0]))
    return two


def test_the_command_ends_with_1_if_something_changed_and_0_if_not(toy_hooks, capsys):
    assert run("--tree", toy_hooks[1]) == 1
    text = capsys.readouterr().out
    assert "+    return self.new_name" in text
    assert "1 of 3 callables are the same" in text
    assert run("--tree", toy_hooks[0]) == 0


def test_the_short_form_and_json(toy_hooks, capsys):
    assert run("--tree", toy_hooks[1], "--short") == 1
    assert "self.new_name" not in capsys.readouterr().out
    assert run("--tree", toy_hooks[1], "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [c["status"] for c in report["hooks"]] == ["same", "changed", "gone"]
    assert (report["base"], report["other"]) == ("1.0.0", "2.0.0")


def test_a_wheel_is_unpacked_once(toy_hooks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wheel = tmp_path / "sglang-2.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in toy_hooks[1].rglob("*.py"):
            archive.write(path, path.relative_to(toy_hooks[1]))
        archive.writestr("sglang/big.so", b"x")
    assert run("--wheel", wheel) == 1
    unpacked = tmp_path / ".cache/sglang/2.0.0"
    assert (unpacked / "sglang/srt/a.py").is_file() and not (unpacked / "sglang/big.so").exists()
    wheel.unlink()
    assert fetch.from_wheel(wheel).release == "2.0.0"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--tree", "/no/such/tree"), "no SGLang there"),
        (("--wheel", "/no/such/sglang-1-py3.whl"), "cannot be unpacked"),
        (("--wheel", "torch-1-py3.whl"), "not a wheel of SGLang"),
        (("--release", "../1"), "not a release number"),
    ],
)
@pytest.mark.usefixtures("toy_hooks")
def test_sources_that_cannot_be_had_are_one_message(capsys, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and told in err


def test_a_release_that_pip_cannot_get_is_one_message(toy_hooks, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: no matching distribution\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    assert run("--release", "9.9.9") == 2
    assert "pip download sglang==9.9.9: ERROR: no matching distribution" in capsys.readouterr().err
    assert not (tmp_path / ".cache/sglang/9.9.9").exists()


def test_a_file_that_is_no_python_is_one_message(toy_hooks, capsys):
    (toy_hooks[1] / "sglang/srt/a.py").write_text("def (:\n")
    assert run("--tree", toy_hooks[1]) == 2
    assert "a.py" in capsys.readouterr().err
    with pytest.raises(PatchError):
        locate(toy_hooks[1], f"{A}.f")
