"""The one table of what we replace in SGLang and what we mirror, read by code and by people.

Adding an SGLang release is described in docs/upgrading.md: `python -m zos_sglang patches diff --release X` shows
which of these changed, `releases` holds what differs, and `patches --fingerprints` prints what goes into
`FINGERPRINTS`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from zos_sglang.upstream.fingerprints import fingerprint, resolve
from zos_sglang.upstream.versions import SUPPORTED, installed

logger = logging.getLogger(__name__)

Kind = Literal["around", "after", "before", "mirror"]
Process = Literal["scheduler", "main"]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_OVERLAP = "sglang.srt.managers.overlap_utils"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_HTTP = "sglang.srt.entrypoints.http_server"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_DP = "sglang.srt.managers.scheduler_components.dp_attn"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_DECODE = "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin"
_HERE = "zos_sglang.upstream"


@dataclass(frozen=True)
class Hook:
    """One upstream callable that we replace, or whose work we do ourselves (`mirror`)."""

    target: str
    kind: Kind
    replacement: str
    why: str
    remove_when: str
    process: Process = "scheduler"
    #: A mirrored callable that our code calls all the same: hooks of others still run.
    called: bool = False
    #: Mirrored by the resident lane only: another plugin's hook of it closes the lane, nothing else.
    lane: bool = False
    #: Supported releases that do this work elsewhere and have no such callable.
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class HookStatus:
    """A table row as `python -m zos_sglang patches` shows it."""

    target: str
    kind: str
    replacement: str
    why: str
    remove_when: str
    status: str
    detail: str


HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_SCHEDULER}.run_event_loop",
        "around",
        f"{_HERE}.entry.around_run_event_loop",
        "one start-up line that says what is in effect, and the last check for another plugin",
        "upstream logs the schedule it chose and why",
    ),
    Hook(
        f"{_SCHEDULER}.event_loop_overlap",
        "around",
        f"{_HERE}.entry.around_event_loop_overlap",
        "our event loop, result queue and guards; modes that change while the server runs",
        "upstream lets a plugin provide the event loop",
    ),
    Hook(
        f"{_PREFILL}.event_loop_overlap_disagg_prefill",
        "around",
        f"{_HERE}.entry.around_event_loop_overlap",
        "the same in the prefill role of disaggregation",
        "upstream lets a plugin provide the event loop",
    ),
    Hook(
        f"{_DECODE}.event_loop_overlap_disagg_decode",
        "around",
        f"{_HERE}.entry.around_event_loop_overlap",
        "the same in the decode role of disaggregation",
        "upstream lets a plugin provide the event loop",
    ),
    Hook(
        f"{_SCHEDULER}.event_loop_normal",
        "around",
        f"{_HERE}.entry.around_event_loop_normal",
        "records of the steps of a server without overlap; the loop itself is SGLang's own",
        "upstream records its steps",
    ),
    Hook(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_future_map",
        "around",
        f"{_HERE}.entry.around_create_future_map",
        "a subclass with a debug mode that checks who reads which row",
        "upstream's own consume-once checks cover the generation of a row",
    ),
    Hook(
        f"{_STATE}._update_handlers",
        "after",
        f"{_HERE}.entry.after_update_handlers",
        "the live mode switch through /set_internal_state",
        "upstream has a registry of update handlers",
    ),
    Hook(
        f"{_STATE}.get_internal_state",
        "after",
        f"{_HERE}.entry.after_get_internal_state",
        "mode, decisions by reason and paths in /server_info",
        "upstream lets a plugin contribute to the internal state",
    ),
    Hook(
        f"{_DP}.SchedulerDPAttnAdapter.prepare_mlp_sync_batch",
        "around",
        f"{_HERE}.entry.around_prepare_mlp_sync_batch",
        "the rule first-token under DP attention: what all ranks know goes with the batch",
        "upstream has a first-token rule",
    ),
    Hook(
        f"{_DP}.MLPSyncBatchInfo.all_gather",
        "around",
        f"{_HERE}.entry.around_mlp_sync_all_gather",
        "the rule first-token under DP attention: one more value in the exchange of every step",
        "upstream has a first-token rule",
    ),
    Hook(
        f"{_DP}.MLPSyncBatchInfo._get_local_tensor",
        "mirror",
        f"{_HERE}.first_token.FirstTokenExchange",
        "the column that carries the value",
        "upstream has a first-token rule",
        called=True,
    ),
    Hook(
        f"{_HTTP}._setup_and_run_http_server",
        "before",
        f"{_HERE}.http.before_http_server",
        "a mode by its name, and HTTP 400 for one that does not exist",
        "upstream's /set_internal_state takes text and reports why an update was rejected",
        "main",
    ),
    Hook(
        f"{_SCHEDULER}.is_disable_overlap_for_batch",
        "mirror",
        "zos_sglang.overlap.guards.make_guard",
        "the guards, with reasons and the first-token rule",
        "upstream returns a reason and has a first-token rule",
    ),
    Hook(
        f"{_SCHEDULER}.run_batch",
        "mirror",
        "zos_sglang.overlap.launch.Launcher.launch",
        "the launch without the work that a plain overlapped step does not need",
        "upstream's launch costs no more",
    ),
    Hook(
        f"{_SCHEDULER}.get_next_batch_to_run",
        "mirror",
        f"{_HERE}.watch_stock.StockWatch",
        "called by our loop at upstream's place; in SGLang's own loops it marks the selection",
        "never: part of the loop that we own",
        called=True,
    ),
    Hook(
        f"{_PREFILL}.get_next_disagg_prefill_batch_to_run",
        "mirror",
        f"{_HERE}.disagg_prefill.PrefillPort.select",
        "called by our loop at upstream's place; in SGLang's own loop it marks the selection",
        "never: part of the loop that we own",
        called=True,
    ),
    Hook(
        f"{_PREFILL}.process_prefill_chunk",
        "mirror",
        f"{_HERE}.disagg_prefill.PrefillPort.process",
        "a result processed before the next selection needs the end of its chunk, which is set there",
        "upstream remembers the end with the result",
        called=True,
    ),
    Hook(
        f"{_DECODE}.get_next_disagg_decode_batch_to_run",
        "mirror",
        f"{_HERE}.disagg_decode.DecodePort.select",
        "called by our loop at upstream's place; in SGLang's own loop it marks the selection",
        "never: part of the loop that we own",
        called=True,
    ),
    Hook(
        f"{_DECODE}.process_decode_queue",
        "mirror",
        f"{_HERE}.disagg_decode.DecodePort.move_queues",
        "called by our loop at upstream's place, and by the lane in each of its steps",
        "never: part of the loop that we own",
        called=True,
    ),
    Hook(
        f"{_SCHEDULER}._record_scheduler_state_for_paused_engine",
        "mirror",
        f"{_HERE}.watch_stock.StockWatch",
        "called by our loop at upstream's place; in SGLang's own loops it marks a pause",
        "never: part of the loop that we own",
        called=True,
    ),
    Hook(
        f"{_SCHEDULER}._forward_isolation",
        "mirror",
        "zos_sglang.overlap.isolation.isolate",
        "one dict copy instead of a getattr per field",
        "upstream's isolation costs no more",
    ),
    Hook(
        f"{_SCHEDULER}.record_batch_in_overlap",
        "mirror",
        "zos_sglang.overlap.isolation.PinRing.pin",
        "one dict copy instead of a getattr per field",
        "upstream records tensors on the forward stream instead",
    ),
    Hook(
        f"{_SCHEDULER}._apply_war_barrier",
        "mirror",
        "zos_sglang.overlap.streams.Streams.war_barrier",
        "records which barrier each step used; reads the environment once",
        "upstream records the barrier kind",
    ),
    Hook(
        f"{_SCHEDULER}._copy_result_to_cpu",
        "mirror",
        "zos_sglang.overlap.launch.Launcher._hand_on",
        "every stream wait stands in one place",
        "never: part of the launch that we own",
        absent=("0.5.22",),
    ),
    Hook(
        f"{_SCHEDULER}.launch_batch_sample_if_needed",
        "mirror",
        "zos_sglang.overlap.launch.Launcher.sample_delayed",
        "every stream wait stands in one place",
        "never: part of the launch that we own",
    ),
    Hook(
        f"{_OVERLAP}.FutureMap",
        "mirror",
        f"{_HERE}.future_map.FutureMap",
        "the base class of ours",
        "never: part of the launch that we own",
        called=True,
    ),
    Hook(
        f"{_OVERLAP}.resolve_forward_inputs",
        "mirror",
        f"{_HERE}.future_map.FutureMap.resolve",
        "called by us in upstream's order; the debug mode looks at what it reads",
        "never: part of the launch that we own",
        called=True,
    ),
    Hook(
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
        "mirror",
        f"{_HERE}.port.SglangDevice.readback",
        "called by us on the copy stream",
        "never: part of the launch that we own",
        called=True,
    ),
    Hook(
        f"{_SCHEDULER}.ingest_requests",
        "mirror",
        f"{_HERE}.lane_port.SglangLanePort.receive",
        "intake in two halves, so that the lane is left before anything that arrived is dispatched",
        "upstream lets the loop look at what arrived",
        lane=True,
    ),
    Hook(
        f"{_SCHEDULER}.update_running_batch",
        "mirror",
        f"{_HERE}.lane_port.SglangLanePort.selected_again",
        "a lane step needs no selection; the token-ratio decay of one is kept",
        "never: part of the lane that we own",
        lane=True,
    ),
    Hook(
        f"{_BATCH}.prepare_for_decode",
        "mirror",
        f"{_HERE}.lane_port.SglangLanePort.write_back",
        "slots are reserved for many steps, lengths are counted on the device and written back on leaving",
        "never: part of the lane that we own",
        lane=True,
    ),
    Hook(
        f"{_SCHEDULER}.process_batch_result",
        "mirror",
        f"{_HERE}.lane_results.LaneResults.process",
        "the same duties, with Python only for the rows that need it",
        "upstream's processing costs no more",
        lane=True,
    ),
    Hook(
        f"{_PROCESSOR}.process_batch_result_decode",
        "mirror",
        f"{_HERE}.lane_results.LaneResults._process_tokens",
        "the same duties, with Python only for the rows that need it",
        "upstream's processing costs no more",
        lane=True,
    ),
    Hook(
        f"{_STREAMER}.accept",
        "mirror",
        "zos_sglang.resident.rows.RowTable.due",
        "called by us for the rows whose output may be due, by its own rule",
        "upstream's streamer costs nothing for rows that are not due",
        lane=True,
    ),
    Hook(
        f"{_REQ}.update_finish_state",
        "mirror",
        "zos_sglang.resident.rows.RowTable.candidates",
        "called by us for the rows that may end, by its own rule",
        "upstream checks a whole batch at once",
        lane=True,
    ),
)

# ruff: noqa: E501
FINGERPRINTS: dict[str, dict[str, str]] = {
    "0.5.23": {
        "sglang.srt.managers.scheduler.Scheduler.run_event_loop": "4448b21e2546bcfa",
        "sglang.srt.managers.scheduler.Scheduler.event_loop_overlap": "f73dae426d07e353",
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.event_loop_overlap_disagg_prefill": "cecae1392fb103eb",
        "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.event_loop_overlap_disagg_decode": "84c6f65aa1f9bb30",
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.get_next_disagg_prefill_batch_to_run": "bd771f5c02d50086",
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_prefill_chunk": "f8506ea27f95c014",
        "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_next_disagg_decode_batch_to_run": "372a575fef98d9c2",
        "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue": "332adf3a21cff928",
        "sglang.srt.managers.scheduler.Scheduler.event_loop_normal": "7c8e84584266cf71",
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run": "2776f8b518c5c4ac",
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine": "0436b24e426187f5",
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_future_map": "ff373760637e4d28",
        "sglang.srt.managers.scheduler_components.dp_attn.SchedulerDPAttnAdapter.prepare_mlp_sync_batch": "12aa3f2d9ed15262",
        "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather": "f83841587f06ee5e",
        "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo._get_local_tensor": "69b409c734640ffb",
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._update_handlers": "4e930c5b095fb16b",
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state": "d7f0f2d88fb2cf14",
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server": "e99dd69c71bc1202",
        "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch": "b3b67e739e047d5a",
        "sglang.srt.managers.scheduler.Scheduler.run_batch": "9a883d858bd61db5",
        "sglang.srt.managers.scheduler.Scheduler._forward_isolation": "3471fca72be6859a",
        "sglang.srt.managers.scheduler.Scheduler.record_batch_in_overlap": "4291fad47c05d7e6",
        "sglang.srt.managers.scheduler.Scheduler._apply_war_barrier": "37e2522a7fcdf8ae",
        "sglang.srt.managers.scheduler.Scheduler._copy_result_to_cpu": "e9346382ae885bf6",
        "sglang.srt.managers.scheduler.Scheduler.launch_batch_sample_if_needed": "95c09952d0735e75",
        "sglang.srt.managers.overlap_utils.FutureMap": "96d05bc34c730c3a",
        "sglang.srt.managers.overlap_utils.resolve_forward_inputs": "6e0b26aa212da537",
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu": "d6fdd389464a24ff",
        "sglang.srt.managers.scheduler.Scheduler.ingest_requests": "14c3e35edfac1a3e",
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch": "f3b5112503b55264",
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode": "7c42a6459164cd33",
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result": "29101b8441226018",
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode": "603e963db43910aa",
        "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept": "54da296b056b6301",
        "sglang.srt.managers.schedule_batch.Req.update_finish_state": "44a1cc70a6fe9428",
    }
}

#: Most callables are the same text in both; these are not.
FINGERPRINTS["0.5.22"] = {
    **FINGERPRINTS["0.5.23"],
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.event_loop_overlap_disagg_prefill": "af845edef0cb1c9a",
    "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather": "1a8b91e4f6c34cc9",
    "sglang.srt.entrypoints.http_server._setup_and_run_http_server": "9d400fc2eff4d200",
    "sglang.srt.managers.scheduler.Scheduler.run_batch": "759ea06b92e93570",
    "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run": "e55f5c18e6f6ae06",
    "sglang.srt.managers.scheduler.Scheduler.launch_batch_sample_if_needed": "bcf4f04e063c3d54",
    "sglang.srt.managers.overlap_utils.FutureMap": "67ac622b7c6d25b9",
    "sglang.srt.managers.scheduler.Scheduler.update_running_batch": "fbfc235bf1470a17",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode": "a54d653f2ec95e86",
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept": "975371d583287de9",
}


def hooks_of(release: str | None) -> tuple[Hook, ...]:
    """The hooks that a release has targets for."""
    return tuple(hook for hook in HOOKS if release not in hook.absent)


for _release, _known in FINGERPRINTS.items():
    for _hook in set(HOOKS) - set(hooks_of(_release)):
        _known.pop(_hook.target, None)


def changed(hook: Hook, release: str) -> str | None:
    """Why a target is not the one we read, or None if it is."""
    try:
        found = fingerprint(resolve(hook.target))
    except Exception as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    known = FINGERPRINTS[release].get(hook.target)
    return None if found == known else f"has changed (fingerprint {found}, known {known})"


def unknown_upstream(process: Process) -> str | None:
    """Why this SGLang is not one that we know, or None: one sentence that says what to do."""
    release = installed()
    if release not in SUPPORTED:
        return (
            f"SGLang {release} is not supported (supported: {', '.join(SUPPORTED)}). "
            f"Install sglang=={SUPPORTED[-1]}, or a zos-sglang for your release."
        )
    for hook in hooks_of(release):
        if hook.process == process and (problem := changed(hook, release)):
            return (
                f"{hook.target} {problem}. This SGLang {release} was modified; reinstall "
                f"sglang=={release}, or use a zos-sglang that knows the change."
            )
    return None


#: Mirrored, but a launch can go through it where somebody else hooks it (`port.needs_upstream_launch`).
RUN_BATCH = f"{_SCHEDULER}.run_batch"


def other_plugins(process: Process) -> str | None:
    """Who else changes one of our targets, or None. Meaningful once plugins are loaded.

    A callable that we replace may be looked at by others, but not replaced or wrapped by them. One whose work
    we do ourselves may not be touched at all: their hook would never be called.
    """
    from sglang.srt.plugins.hook_registry import HookType

    wraps = (HookType.REPLACE, HookType.AROUND)
    for hook in HOOKS:
        if hook.process != process or hook.called or hook.lane or hook.target == RUN_BATCH:
            continue
        if rival := rival_of(hook.target, tuple(HookType) if hook.kind == "mirror" else wraps):
            return rival
        if rival := rival_of(hook.target.rsplit(".", 1)[0], (HookType.REPLACE,)):
            return rival
    return None


def lane_rival() -> str | None:
    """Who else changes what the lane does itself, or None."""
    from sglang.srt.plugins.hook_registry import HookType

    found = (rival_of(hook.target, tuple(HookType)) for hook in HOOKS if hook.lane)
    return next((rival for rival in found if rival), None)


def rival_of(target: str, kinds: tuple[Any, ...]) -> str | None:
    """One sentence about another plugin's hook of one of `kinds` on a target, or None."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for kind, replacement, source in HookRegistry._hooks.get(target, ()):
        if kind in kinds and not getattr(replacement, "__module__", "").startswith("zos_sglang."):
            who = f"plugin {source.plugin_name}" if source else replacement.__module__
            verb = {"replace": "replaces", "around": "wraps"}.get(kind.value, f"hooks ({kind.value})")
            return (
                f"{who} {verb} {target}, which zos-sglang needs. Keep one of the two: "
                f"SGLANG_PLUGINS names the plugins to load."
            )
    return None


def register(process: Process) -> None:
    """Register this process's hooks with SGLang's registry, which applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks_of(installed()):
        if hook.process == process and hook.kind != "mirror" and not in_source(hook):
            _originals[hook.target] = _static(hook.target)
            HookRegistry.register(hook.target, resolve(hook.replacement), HookType(hook.kind))


def in_source(hook: Hook) -> bool:
    """Whether this SGLang was built with our source patches (`patches/`), which call the hook themselves."""
    return getattr(resolve(hook.target), "__zos_hook__", None) == hook.replacement


def not_in_source(process: Process) -> list[str]:
    """Targets of a process's hooks that this SGLang's source does not call."""
    ours = [h for h in hooks_of(installed()) if h.process == process and h.kind != "mirror"]
    return [h.target for h in ours if not in_source(h)]


_originals: dict[str, Any] = {}


def _static(target: str) -> Any:
    """An attribute as it stands in its owner, without binding it."""
    owner, name = target.rsplit(".", 1)
    return resolve(owner).__dict__[name]


def restore() -> list[str]:
    """Put every original back where our hooks stand; returns the targets that could not be.

    Names that other modules imported are put back too, as the registry had replaced them.
    """
    from sglang.srt.plugins.hook_registry import _propagate_patch

    failed = []
    for target, original in _originals.items():
        owner_path, name = target.rsplit(".", 1)
        try:
            owner = resolve(owner_path)
            ours = owner.__dict__[name]
            setattr(owner, name, original)
            _propagate_patch(ours, original, owner)
            back = owner.__dict__[name] is original
        except Exception:
            # The others are still to be put back.
            logger.exception("zos-sglang: %s could not be put back", target)
            back = False
        if not back:
            failed.append(target)
    return failed


def table() -> list[HookStatus]:
    """Every hook with its state in an installation like this one."""
    release = installed()
    rows = []
    for hook in HOOKS:
        if release not in SUPPORTED:
            status, detail = "unsupported", f"SGLang {release}"
        elif release in hook.absent:
            status, detail = "absent", f"SGLang {release} does this work elsewhere"
        elif problem := changed(hook, release):
            status, detail = "changed", problem
        elif hook.kind == "mirror":
            status, detail = "known", f"in the {hook.process} process"
        elif in_source(hook):
            status, detail = "in source", "this SGLang was built with zos-sglang's patches"
        else:
            here = _originals.get(hook.target) is not None
            status = "applied" if here else "ready"
            detail = f"applied in the {hook.process} process when ZOS_MODE is set"
        rows.append(HookStatus(**{**_columns(hook), "status": status, "detail": detail}))
    return rows


def _columns(hook: Hook) -> dict[str, str]:
    return {
        "target": hook.target,
        "kind": hook.kind,
        "replacement": hook.replacement,
        "why": hook.why,
        "remove_when": hook.remove_when,
    }
