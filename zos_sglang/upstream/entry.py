"""The hook functions themselves: thin, and harmless while the plugin is inert."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zos_sglang.modes import mode_from_code, rule_from_code
from zos_sglang.upstream import hooks
from zos_sglang.upstream.record_handlers import record_handlers
from zos_sglang.upstream.runtime import runtime
from zos_sglang.upstream.whole_numbers import whole_number

logger = logging.getLogger(__name__)

#: Most replays that `zos_floor` takes: they hold up the server.
MOST_REPLAYS = 10_000


class UnusableError(RuntimeError):
    """ZOS_STRICT=1 and the plugin cannot do its work here."""


def around_run_event_loop(original: Callable[..., Any], scheduler: Any) -> Any:
    """Say what is in effect, once, before the first iteration."""
    from zos_sglang.upstream.overlap_off import startup_line

    if conflict := hooks.other_plugins("scheduler"):
        step_aside(conflict)
    if runtime.settings.mode is not None and _speaks(scheduler):
        try:
            logger.info(startup_line(runtime.settings, scheduler.server_args, scheduler.enable_overlap))
        except Exception:
            logger.exception("zos-sglang: the start-up line failed; the server starts all the same")
    return original(scheduler)


def _speaks(scheduler: Any) -> bool:
    """Whether this is the one process of a model's ranks and stages that says it."""
    stages = scheduler.pp_group
    return scheduler.tp_group.rank_in_group == 0 and (stages is None or stages.is_first_rank)


def around_event_loop_overlap(original: Callable[..., Any], scheduler: Any) -> Any:
    """Our loop in place of upstream's; upstream's own where the plugin stepped aside."""
    if runtime.settings.mode is None:
        return original(scheduler)
    return runtime.run(original, scheduler)


def around_event_loop_normal(original: Callable[..., Any], scheduler: Any) -> Any:
    """SGLang's loop without overlap, as it is; we only watch."""
    if runtime.settings.mode in (None, "off"):
        return original(scheduler)
    return runtime.watch_only(original, scheduler)


def around_create_future_map(
    original: Callable[..., Any], algorithm: Any, device: Any, pool: Any, *args: Any, **kwargs: Any
) -> Any:
    """The future map with its debug mode, where upstream would build its own plain one."""
    if runtime.settings.mode is None:
        return original(algorithm, device, pool, *args, **kwargs)
    from zos_sglang.upstream.future_map import FutureMap

    return FutureMap(device, algorithm, pool, *args, **kwargs)


def around_prepare_mlp_sync_batch(original: Callable[..., Any], adapter: Any, local_batch: Any) -> Any:
    """Before every step under DP attention: the ranks tell each other what they are about to run."""
    return runtime.first_token.prepare(original, adapter, local_batch)


def around_mlp_sync_all_gather(original: Callable[..., None], info: Any, *args: Any, **kwargs: Any) -> None:
    """The exchange itself."""
    runtime.first_token.gather(original, info, *args, **kwargs)


def after_update_handlers(handlers: dict[str, Any], controller: Any) -> dict[str, Any]:
    """Add the live switch to what /set_internal_state can update."""
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    def validate_loop(key: str) -> None:
        if runtime.scheduler is None:
            raise UpdateRejected(f"{key}: this server does not run an event loop of zos-sglang.")
        if runtime.mode == "normal":
            raise UpdateRejected(
                f"{key}: this server runs SGLang's loop without overlap (--disable-overlap-schedule, or a "
                f"feature that turned overlap off), where zos-sglang only watches."
            )

    def named(noun: str, from_code: Callable[[float], Any], ask: Callable[[Any], None]) -> Any:
        """The handler of a value that travels as a number and has a name here."""

        def validate(key: str, value: Any) -> None:
            validate_loop(key)
            if from_code(value) is None:
                raise UpdateRejected(f"{key}: {value} is no {noun}.")

        return _UpdateHandler(validate, lambda key, value: ask(from_code(value)))

    def needs_lane(there: bool) -> str | None:
        return None if there else "needs mode resident, with its lane in working order."

    floor = whole_number(
        runtime,
        1,
        MOST_REPLAYS,
        runtime.time_floor,
        why_not=lambda: needs_lane(runtime.can_ride),
        why_nobody=lambda: needs_lane(runtime.mode == "resident"),
        unit=" of replays",
    )
    if runtime.settings.mode is None:
        return handlers
    return {
        **handlers,
        "zos_mode": named("mode", mode_from_code, runtime.request),
        "zos_consecutive_prefill": named("consecutive-prefill rule", rule_from_code, runtime.request_rule),
        "zos_floor": floor,
        **record_handlers(runtime),
        **_fault_handlers(),
    }


def _fault_handlers() -> dict[str, Any]:
    if runtime.settings.fault is None:
        return {}
    from zos_sglang.upstream.fault_points import fault_handlers

    return fault_handlers(runtime)


def after_get_internal_state(output: Any, controller: Any, *_: Any, **__: Any) -> Any:
    """Add our block to the internal state."""
    if runtime.scheduler is not None:
        try:
            output.internal_state["zos"] = runtime.report()
        except Exception:
            runtime.account.fell_back("report", "/server_info is complete but for our block")
    return output


def step_aside(problem: str) -> None:
    """Become inert with one warning.

    Raises:
        UnusableError: under ZOS_STRICT=1.
    """
    if runtime.settings.strict:
        raise UnusableError(f"zos-sglang cannot start (ZOS_STRICT=1): {problem}")
    logger.warning("zos-sglang is inactive, stock SGLang runs: %s", problem)
    runtime.settings = runtime.settings.model_copy(update={"mode": None})
