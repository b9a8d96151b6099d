"""The hook table against the SGLang that is installed, and what happens when that is another one."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
from types import SimpleNamespace

import pytest
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from zos_sglang.modes import MODE_CODES, RULE_CODES
from zos_sglang.settings import Settings
from zos_sglang.upstream import entry, hooks, overlap_off
from zos_sglang.upstream.fingerprints import fingerprint, resolve
from zos_sglang.upstream.future_map import FutureMap
from zos_sglang.upstream.runtime import Runtime, runtime

LOOP = "sglang.srt.managers.scheduler.Scheduler.event_loop_overlap"
RELEASE = hooks.installed()
OURS = [h for h in hooks.HOOKS if h.kind != "mirror"]


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry and a runtime of this test's own."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(hooks, "_originals", {})
    fresh = Runtime()
    fresh.settings = Settings(mode="overlap")
    monkeypatch.setattr(entry, "runtime", fresh)
    return fresh


# ---------------------------------------------------------------- fingerprints


@pytest.mark.parametrize("hook", hooks.hooks_of(RELEASE), ids=lambda h: h.target.rsplit(".", 2)[-1])
def test_the_installed_target_is_the_one_we_read(hook):
    assert hooks.changed(hook, RELEASE) is None


def test_every_target_has_a_fingerprint_and_every_fingerprint_a_target():
    targets = [h.target for h in hooks.HOOKS]
    assert len(set(targets)) == len(targets)
    for release in hooks.SUPPORTED:
        assert set(hooks.FINGERPRINTS[release]) == {h.target for h in hooks.hooks_of(release)}


def test_what_a_release_does_elsewhere_is_nothing_that_we_replace():
    """A mirrored callable may be absent, since our code does its work. A hook must have its place."""
    assert [h.target for h in hooks.HOOKS if h.absent and h.kind != "mirror"] == []
    assert {release for h in hooks.HOOKS for release in h.absent} <= set(hooks.SUPPORTED)


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda h: h.replacement.rsplit(".", 2)[-1])
def test_every_replacement_exists_and_says_why_and_until_when(hook):
    if hook.replacement.startswith("zos_sglang.upstream.port"):
        importlib.import_module("zos_sglang.upstream.port")
    assert callable(resolve(hook.replacement))
    assert hook.why and hook.remove_when


NUMBERS = itertools.count()


def source_of(tmp_path, monkeypatch, body):
    """A function from a file of its own."""
    name = f"fingerprinted_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    return fingerprint(importlib.import_module(name).f)


def test_a_fingerprint_sees_the_body_and_the_parameters_and_no_white_space_or_decorators(
    tmp_path, monkeypatch
):
    def of(body):
        return source_of(tmp_path, monkeypatch, body)

    plain = of("def f(a, b=1):\n    return a + b\n")
    assert of("def f(a, b=1):\n\n    return a + b   \n") == plain
    assert of("import functools\n\n@functools.cache\ndef f(a, b=1):\n    return a + b\n") == plain
    assert of("def f(a, b=1):\n    return a - b\n") != plain
    assert of("def f(a, b=1, *, c=2):\n    return a + b\n") != plain


def test_a_wrapped_callable_has_the_fingerprint_of_what_it_wraps():
    HookRegistry.register(LOOP, lambda original, self: original(self), HookType.AROUND)
    before = resolve(LOOP)
    try:
        HookRegistry.apply_hooks()
        assert resolve(LOOP) is not before
        assert fingerprint(resolve(LOOP)) == hooks.FINGERPRINTS[RELEASE][LOOP]
    finally:
        setattr(sglang.srt.managers.scheduler.Scheduler, "event_loop_overlap", before)  # noqa: B010


# ---------------------------------------------------------------- another SGLang


@pytest.mark.parametrize("process", ["scheduler", "main"])
def test_this_sglang_is_known(process):
    assert hooks.unknown_upstream(process) is None


def test_another_fingerprint_names_the_target_and_the_fix(monkeypatch):
    monkeypatch.setitem(hooks.FINGERPRINTS[RELEASE], LOOP, "0" * 16)
    problem = hooks.unknown_upstream("scheduler")
    assert problem.startswith(f"{LOOP} has changed (fingerprint ")
    assert "known 0000000000000000" in problem and f"reinstall sglang=={RELEASE}" in problem
    assert hooks.unknown_upstream("main") is None


def test_a_changed_callable_is_noticed(monkeypatch):
    scheduler = sglang.srt.managers.scheduler.Scheduler
    monkeypatch.setattr(scheduler, "run_batch", lambda self, batch: None)
    assert "Scheduler.run_batch has changed" in hooks.unknown_upstream("scheduler")


def test_a_callable_that_is_gone_is_noticed(monkeypatch):
    monkeypatch.delattr(sglang.srt.managers.scheduler.Scheduler, "record_batch_in_overlap")
    problem = hooks.unknown_upstream("scheduler")
    assert "record_batch_in_overlap cannot be read (AttributeError" in problem


@pytest.mark.parametrize("release", ["0.5.21", "0.6.0", None])
def test_another_release_names_the_supported_ones(monkeypatch, release):
    monkeypatch.setattr(hooks, "installed", lambda: release)
    problem = hooks.unknown_upstream("scheduler")
    assert f"SGLang {release} is not supported (supported: 0.5.22, 0.5.23)" in problem
    assert "sglang==0.5.23" in problem


def test_stepping_aside_is_one_warning_and_the_plugin_is_inert(registry, caplog):
    entry.step_aside("the reason")
    assert registry.settings.mode is None
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.WARNING, "zos-sglang is inactive, stock SGLang runs: the reason")
    ]


def test_stepping_aside_under_strict_is_an_error(registry):
    registry.settings = Settings(mode="overlap", strict=True)
    with pytest.raises(entry.UnusableError, match=r"cannot start \(ZOS_STRICT=1\): the reason"):
        entry.step_aside("the reason")
    assert registry.settings.mode == "overlap"


# ---------------------------------------------------------------- another plugin


def rival(original, scheduler):
    """Another plugin's hook."""
    return original(scheduler)


class Rival:
    """Another plugin's scheduler."""


RIVAL = HookSource("rival_plugin", "rival-dist")
LOOKS_ON = (HookType.BEFORE, HookType.AFTER)


MIRRORED = "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch"
CALLED = "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu"


@pytest.mark.parametrize(("kind", "verb"), [(HookType.AROUND, "wraps"), (HookType.REPLACE, "replaces")])
def test_another_plugin_on_one_of_our_targets_is_named(kind, verb):
    HookRegistry.register(LOOP, rival, kind, source=RIVAL)
    conflict = hooks.other_plugins("scheduler")
    assert f"plugin rival_plugin {verb} {LOOP}" in conflict
    assert "SGLANG_PLUGINS" in conflict
    assert hooks.other_plugins("main") is None


def test_a_hook_of_nobody_in_particular_is_named_by_its_module():
    HookRegistry.register(LOOP, rival, HookType.REPLACE)
    assert f"{__name__} replaces" in hooks.other_plugins("scheduler")


@pytest.mark.parametrize("kind", [HookType.BEFORE, HookType.AFTER])
def test_a_plugin_that_only_looks_on_is_no_conflict(kind):
    HookRegistry.register(LOOP, rival, kind, source=RIVAL)
    assert hooks.other_plugins("scheduler") is None


@pytest.mark.parametrize("kind", list(HookType))
def test_any_hook_on_a_callable_whose_work_we_do_ourselves_is_a_conflict(kind):
    HookRegistry.register(MIRRORED, rival, kind, source=RIVAL)
    assert f"rival_plugin {'hooks' if kind in LOOKS_ON else ''}" in hooks.other_plugins("scheduler")
    assert MIRRORED in hooks.other_plugins("scheduler")


@pytest.mark.parametrize("target", [CALLED, hooks.RUN_BATCH])
def test_a_hook_on_a_callable_that_is_still_called_is_no_conflict(target):
    HookRegistry.register(target, rival, HookType.AROUND, source=RIVAL)
    assert hooks.other_plugins("scheduler") is None


def test_another_class_in_place_of_the_scheduler_is_a_conflict():
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", Rival, HookType.REPLACE, source=RIVAL)
    assert "rival_plugin replaces sglang.srt.managers.scheduler.Scheduler," in hooks.other_plugins(
        "scheduler"
    )


def test_our_own_hooks_are_no_conflict():
    for process in ("scheduler", "main"):
        hooks.register(process)
        assert hooks.other_plugins(process) is None


def scheduler_at_start(rank=0, stage=0):
    return SimpleNamespace(
        server_args=None,
        enable_overlap=True,
        tp_group=SimpleNamespace(rank_in_group=rank),
        pp_group=SimpleNamespace(is_first_rank=stage == 0),
    )


def test_with_a_rival_the_stock_loop_runs(registry, monkeypatch, caplog):
    HookRegistry.register(LOOP, rival, HookType.AROUND, source=RIVAL)
    scheduler, ran = scheduler_at_start(), []
    loop = lambda s: entry.around_event_loop_overlap(lambda s: ran.append("stock"), s)  # noqa: E731
    entry.around_run_event_loop(loop, scheduler)
    assert ran == ["stock"] and registry.settings.mode is None
    assert "plugin rival_plugin wraps" in caplog.text


def test_with_a_rival_and_strict_the_process_ends(registry):
    registry.settings = Settings(mode="overlap", strict=True)
    HookRegistry.register(LOOP, rival, HookType.AROUND, source=RIVAL)
    with pytest.raises(entry.UnusableError, match="rival_plugin"):
        entry.around_run_event_loop(lambda s: pytest.fail("started"), scheduler_at_start())


# ---------------------------------------------------------------- register, apply, restore


def bindings(target):
    """The target and every other module's name for the same object."""
    owner, name = target.rsplit(".", 1)
    value = resolve(owner).__dict__[name]
    names = [
        (module, attribute)
        for module in list(sys.modules.values())
        for attribute, bound in list(getattr(module, "__dict__", {}).items())
        if bound is value
    ]
    return value, names


@pytest.mark.parametrize("process", ["scheduler", "main"])
def test_after_restore_every_target_is_the_identical_original(process):
    targets = [h.target for h in OURS if h.process == process]
    before = {t: bindings(t) for t in targets}
    hooks.register(process)
    HookRegistry.apply_hooks()
    try:
        for target in targets:
            assert bindings(target)[0] is not before[target][0], target
    finally:
        failed = hooks.restore()
    assert failed == []
    for target, (original, names) in before.items():
        assert bindings(target)[0] is original
        assert all(getattr(module, name) is original for module, name in names)


def test_a_target_that_cannot_be_put_back_keeps_no_other_from_it(monkeypatch):
    targets = [h.target for h in OURS if h.process == "scheduler"]
    before = {t: bindings(t)[0] for t in targets}
    hooks.register("scheduler")
    HookRegistry.apply_hooks()
    find = hooks.resolve

    def failing(path):
        if path == targets[0].rsplit(".", 1)[0] and not failed:
            failed.append(path)
            raise AttributeError(path)
        return find(path)

    failed: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "resolve", failing)
        assert len(hooks.restore()) == 1
    assert sum(bindings(t)[0] is not before[t] for t in targets) == 1
    assert hooks.restore() == []
    assert all(bindings(t)[0] is before[t] for t in targets)


def test_hooks_that_stand_in_the_source_are_not_registered_again(monkeypatch):
    """An SGLang built with our patches calls them itself."""
    hook = next(h for h in OURS if h.target == LOOP)
    assert not hooks.in_source(hook)
    monkeypatch.setattr(resolve(LOOP), "__zos_hook__", hook.replacement, raising=False)
    hooks.register("scheduler")
    assert LOOP not in HookRegistry._hooks
    assert {r.status for r in hooks.table() if r.target == LOOP} == {"in source"}


# ---------------------------------------------------------------- the table


def test_the_table_has_a_row_for_every_hook():
    rows = hooks.table()
    assert [r.target for r in rows] == [h.target for h in hooks.HOOKS]
    assert {r.status for r in rows if r.kind != "mirror"} == {"ready"}
    absent = {h.target for h in hooks.HOOKS if RELEASE in h.absent}
    assert {r.status for r in rows if r.kind == "mirror" and r.target not in absent} == {"known"}
    assert {r.target for r in rows if r.status == "absent"} == absent


def test_the_table_says_what_is_applied_here():
    hooks.register("main")
    applied = [r.target for r in hooks.table() if r.status == "applied"]
    assert applied == [h.target for h in OURS if h.process == "main"]


def test_the_table_says_what_has_changed(monkeypatch):
    monkeypatch.setitem(hooks.FINGERPRINTS[RELEASE], LOOP, "0" * 16)
    row = next(r for r in hooks.table() if r.target == LOOP)
    assert row.status == "changed" and "known 0000000000000000" in row.detail


def test_the_table_says_that_a_release_is_unsupported(monkeypatch):
    monkeypatch.setattr(hooks, "installed", lambda: "9.9")
    assert {(r.status, r.detail) for r in hooks.table()} == {("unsupported", "SGLang 9.9")}


# ---------------------------------------------------------------- the hooks themselves


@pytest.mark.parametrize(("rank", "said"), [((0, 0), True), ((1, 0), False), ((0, 1), False)])
def test_the_first_rank_of_the_first_stage_says_once_what_is_in_effect(monkeypatch, caplog, rank, said):
    monkeypatch.setattr(overlap_off, "startup_line", lambda *_: "the one line")
    caplog.set_level(logging.INFO)
    assert entry.around_run_event_loop(lambda s: "ran", scheduler_at_start(*rank)) == "ran"
    assert ("the one line" in caplog.text) is said


def test_a_line_that_fails_does_not_stop_the_server(monkeypatch, caplog):
    monkeypatch.setattr(overlap_off, "startup_line", lambda *_: 1 / 0)
    assert entry.around_run_event_loop(lambda s: "ran", scheduler_at_start()) == "ran"
    assert "the start-up line failed" in caplog.text


def test_the_loop_hook_runs_ours_unless_the_plugin_is_inert(registry):
    registry.run = lambda original, scheduler: "ours"
    assert entry.around_event_loop_overlap(lambda s: "stock", None) == "ours"
    registry.settings = Settings()
    assert entry.around_event_loop_overlap(lambda s: "stock", None) == "stock"


def test_the_future_map_is_ours_unless_the_plugin_is_inert(registry):
    import torch

    pool = SimpleNamespace(req_to_token=torch.zeros((4, 4)), req_generation=torch.zeros(4))
    arguments = (SpeculativeAlgorithm.NONE, torch.device("cpu"), pool, False)
    made = entry.around_create_future_map(lambda *_: "stock", *arguments)
    assert type(made) is FutureMap and made.needs_cpu_seq_lens is False
    registry.settings = Settings()
    assert entry.around_create_future_map(lambda *a: a, *arguments) == arguments


def handlers():
    return entry.after_update_handlers({"known": 1}, None)


def test_the_live_switch_takes_a_known_mode(registry):
    registry.scheduler = SimpleNamespace()
    asked = []
    registry.request = asked.append
    update = handlers()["zos_mode"]
    update.validate("zos_mode", float(MODE_CODES["stock"]))
    update.apply("zos_mode", float(MODE_CODES["stock"]))
    assert asked == ["stock"]


def test_the_live_switch_takes_a_known_prefill_rule(registry):
    registry.scheduler = SimpleNamespace()
    asked = []
    registry.request_rule = asked.append
    update = handlers()["zos_consecutive_prefill"]
    for rule, code in RULE_CODES.items():
        update.validate("zos_consecutive_prefill", float(code))
        update.apply("zos_consecutive_prefill", float(code))
        assert asked.pop() is rule


@pytest.mark.parametrize("code", [3.0, 0.5, -1.0])
def test_the_live_switch_rejects_what_is_no_prefill_rule(registry, code):
    registry.scheduler = SimpleNamespace()
    with pytest.raises(UpdateRejected, match="is no consecutive-prefill rule"):
        handlers()["zos_consecutive_prefill"].validate("zos_consecutive_prefill", code)


@pytest.mark.parametrize("code", [7.0, 2.5, -1.0])
def test_the_live_switch_rejects_what_is_no_mode(registry, code):
    registry.scheduler = SimpleNamespace()
    with pytest.raises(UpdateRejected, match="is no mode"):
        handlers()["zos_mode"].validate("zos_mode", code)


def test_the_live_switch_is_rejected_where_no_loop_of_ours_runs():
    with pytest.raises(UpdateRejected, match="does not run an event loop of zos-sglang"):
        handlers()["zos_mode"].validate("zos_mode", 1.0)


def test_upstreams_handlers_stay_and_an_inert_plugin_adds_none(registry):
    assert handlers()["known"] == 1
    registry.settings = Settings()
    assert handlers() == {"known": 1}


def test_the_internal_state_carries_our_block(registry):
    output = SimpleNamespace(internal_state={"load": 1})
    assert entry.after_get_internal_state(output, None).internal_state == {"load": 1}
    registry.scheduler = SimpleNamespace()
    registry.report = lambda: {"mode": "overlap"}
    entry.after_get_internal_state(output, None)
    assert output.internal_state == {"load": 1, "zos": {"mode": "overlap"}}


def test_a_report_that_fails_leaves_the_rest_of_the_state(registry, caplog):
    registry.scheduler = SimpleNamespace()
    registry.report = lambda: 1 / 0
    output = SimpleNamespace(internal_state={"load": 1})
    assert entry.after_get_internal_state(output, None).internal_state == {"load": 1}
    assert "report failed" in caplog.text


def test_the_tests_run_on_a_runtime_of_their_own():
    assert entry.runtime is not runtime and runtime.scheduler is None
