"""The entry point that SGLang calls: inert without ZOS_MODE, loud about bad settings."""

from __future__ import annotations

import logging
import sys

import pytest

from zos_sglang import plugin
from zos_sglang.settings import Settings
from zos_sglang.upstream import hooks
from zos_sglang.upstream.runtime import runtime


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Which processes were registered; the real registry stays as it is."""
    done = []
    monkeypatch.setattr(runtime, "settings", Settings())
    monkeypatch.setattr(hooks, "register", done.append)
    monkeypatch.setattr(hooks, "unknown_upstream", lambda process: None)
    return done


@pytest.fixture
def child(monkeypatch):
    """This process looks like one that SGLang started."""
    monkeypatch.setattr(plugin.multiprocessing, "parent_process", object)


def test_without_a_mode_nothing_happens(registered):
    plugin.register()
    assert registered == [] and runtime.settings.mode is None


def test_settings_without_a_mode_change_nothing_and_a_typo_in_them_is_a_warning(
    monkeypatch, registered, caplog
):
    monkeypatch.setenv("ZOS_STRICT", "1")
    plugin.register()
    monkeypatch.setenv("ZOS_STRIKT", "1")
    plugin.register()
    assert registered == [] and runtime.settings.mode is None
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "ZOS_MODE is not set" in caplog.text and "ZOS_STRICT" in caplog.text


def test_mode_off_patches_nothing(monkeypatch, registered):
    monkeypatch.setenv("ZOS_MODE", "off")
    plugin.register()
    assert registered == [] and runtime.settings.mode is None


def test_mode_overlap_registers_the_main_process(monkeypatch, registered):
    monkeypatch.setenv("ZOS_MODE", "overlap")
    plugin.register()
    assert registered == ["main"] and runtime.settings.mode == "overlap"


def loaded(monkeypatch, *names):
    """Make exactly these of SGLang's process modules look imported."""
    for name in ("managers.scheduler", "managers.detokenizer_manager", "entrypoints.http_server"):
        monkeypatch.delitem(sys.modules, f"sglang.srt.{name}", raising=False)
    for name in names:
        monkeypatch.setitem(sys.modules, name, object())


@pytest.mark.usefixtures("child")
def test_a_scheduler_process_gets_its_own_hooks(monkeypatch, registered):
    monkeypatch.setenv("ZOS_MODE", "sync")
    loaded(monkeypatch, "sglang.srt.managers.scheduler")
    plugin.register()
    assert registered == ["scheduler"]


@pytest.mark.usefixtures("child")
def test_the_detokenizer_is_left_alone(monkeypatch, registered):
    monkeypatch.setenv("ZOS_MODE", "overlap")
    loaded(monkeypatch, "sglang.srt.managers.detokenizer_manager")
    plugin.register()
    assert registered == []


@pytest.mark.usefixtures("child")
@pytest.mark.parametrize(
    ("modules", "roles"),
    [
        ([], ["main"]),
        (["sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"], ["main", "scheduler"]),
    ],
)
def test_a_server_started_in_somebodys_child_process_gets_the_hooks_of_its_front(
    monkeypatch, registered, modules, roles
):
    monkeypatch.setenv("ZOS_MODE", "overlap")
    loaded(monkeypatch, *modules)
    plugin.register()
    assert registered == roles


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("ZOS_MODE=overlpa", "Did you mean overlap?"),
        ("ZOS_WAIT=sleep", "ZOS_WAIT=sleep"),
        ("ZOS_STRIKT=1", "Did you mean ZOS_STRICT?"),
    ],
)
def test_bad_settings_end_the_process_with_their_message(monkeypatch, capsys, registered, setting, said):
    monkeypatch.setenv("ZOS_MODE", "overlap")
    monkeypatch.setenv(*setting.split("="))
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert stopped.value.code == 2 and registered == []
    err = capsys.readouterr().err
    assert said in err and err.startswith("zos-sglang: ")


def test_an_sglang_that_we_do_not_know_leaves_stock_with_one_warning(monkeypatch, registered, caplog):
    monkeypatch.setenv("ZOS_MODE", "overlap")
    monkeypatch.setattr(hooks, "unknown_upstream", lambda process: "SGLang 9.9 is not supported.")
    plugin.register()
    assert registered == [] and runtime.settings.mode is None
    assert [r.getMessage() for r in caplog.records] == [
        "zos-sglang is inactive, stock SGLang runs: SGLang 9.9 is not supported."
    ]


def test_under_strict_an_sglang_that_we_do_not_know_ends_the_process(monkeypatch, capsys, registered):
    monkeypatch.setenv("ZOS_MODE", "overlap")
    monkeypatch.setenv("ZOS_STRICT", "1")
    monkeypatch.setattr(hooks, "unknown_upstream", lambda process: "SGLang 9.9 is not supported.")
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert stopped.value.code == 2 and registered == []
    assert "cannot start (ZOS_STRICT=1): SGLang 9.9 is not supported." in capsys.readouterr().err


# ---------------------------------------------------------------- called from a patched source

HOOK = "zos_sglang.upstream.entry.around_run_event_loop"


@pytest.fixture
def patched(monkeypatch):
    """A process of a patched SGLang whose plugin loader has not called us."""
    monkeypatch.setattr(plugin, "_called", set())
    monkeypatch.setattr(hooks, "in_source", lambda hook: True)
    monkeypatch.setenv("ZOS_MODE", "overlap")


def test_the_first_hook_in_a_source_registers_once_where_the_loader_did_not(patched, registered):
    assert plugin.from_source(HOOK) is hooks.resolve(HOOK)
    plugin.from_source(HOOK)
    assert registered == ["main"] and runtime.settings.mode == "overlap"


def test_where_the_loader_called_a_hook_in_a_source_does_not_register_again(patched, registered):
    plugin.register()
    plugin.from_source(HOOK)
    assert registered == ["main"]


def test_patches_that_lack_a_hook_are_told(patched, registered, monkeypatch, caplog):
    monkeypatch.setattr(hooks, "in_source", lambda hook: hook.process != "main")
    plugin.from_source(HOOK)
    assert "source patches lack sglang.srt.entrypoints.http_server._setup_and_run_http_server" in caplog.text


def test_patches_of_another_version_are_told_once_and_their_function_runs_as_it_is(patched, caplog):
    assert plugin.from_source("zos_sglang.upstream.entry.no_such_hook") is None
    assert plugin.from_source("zos_sglang.upstream.entry.no_such_hook") is None
    assert caplog.text.count("are of another zos-sglang: no zos_sglang.upstream.entry.no_such_hook") == 1


def test_bad_settings_end_a_patched_server_too(patched, monkeypatch, capsys):
    monkeypatch.setenv("ZOS_MODE", "overlpa")
    with pytest.raises(SystemExit):
        plugin.from_source(HOOK)
    assert "ZOS_MODE=overlpa: not allowed" in capsys.readouterr().err
