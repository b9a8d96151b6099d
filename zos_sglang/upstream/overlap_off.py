"""Which upstream rule turned the overlap schedule off, and the start-up line that says so.

SGLang resolves its server arguments by a chain of rules, and keeps each decision beside the name
of the rule that took it (`_resolved_overrides`, pickled into the scheduler process). We read that
record. Deriving the conditions again would go wrong with the first release that changes one.
"""

from typing import Any

from zos_sglang import __version__
from zos_sglang.settings import Settings
from zos_sglang.upstream.versions import installed

FIELD = "disable_overlap_schedule"

RULES = {
    "_pipeline_parallel_overlap_disable": "pipeline parallelism (--pp-size above 1)",
    "_mamba_radix_cache_resolution": "the no_buffer Mamba cache "
    "(--mamba-radix-cache-strategy; this model or its --linear-attn-backend has no extra_buffer)",
    "_sparse_head_overlap_disable": "sparse-head embeddings (SGLANG_EMBEDDINGS_SPARSE_HEAD)",
    "_dllm_overlap_disable": "diffusion LLM (--dllm-algorithm)",
    "_disable_overlap_schedule_for_cpu": "speculation on CPU (--speculative-algorithm)",
    "_handle_mps_backends": "the MPS device without MLX",
}
BY_USER = "--disable-overlap-schedule"
UNKNOWN = "an upstream rule that zos-sglang does not know"


def why_overlap_is_off(server_args: Any) -> str | None:
    """The rules that turned overlap off, in words, or None while it is on.

    `server_args` is resolved (after `resolve_once`, or as the scheduler process gets it). Every
    rule is named: undoing only one of two would leave overlap off.
    """
    if not _resolved(server_args, FIELD):
        return None
    reasons = [BY_USER] if _asked_for(server_args, FIELD) else []
    for source, declared in getattr(server_args, "_resolved_overrides", None) or ():
        if declared.get(FIELD):
            reasons.append(RULES.get(source, f"{UNKNOWN} ({source})"))
    return " and ".join(dict.fromkeys(reasons)) or UNKNOWN


def loop_left_alone(server_args: Any) -> str | None:
    """The upstream event loop that runs instead of the one we replace, or None.

    Same order as upstream's dispatch: the disaggregation role first, then the others.
    """
    role = _resolved(server_args, "disaggregation_mode")
    if role not in (None, "null"):
        return f"the disaggregation loop of the {role} role"
    if _resolved(server_args, "enable_pdmux"):
        return "the PD-multiplexing loop"
    if (_resolved(server_args, "pp_size") or 1) > 1:
        return "the pipeline-parallel loop"
    if _uses_mlx():
        return "the MLX loop"
    if _resolved(server_args, "dllm_algorithm"):
        return "the diffusion-LLM loop"
    return None


def startup_line(
    settings: Settings, server_args: Any, overlap_on: bool, sglang_version: str | None = None
) -> str:
    """The one line at start: mode, SGLang's version, overlap on or off, and by which rule.

    `overlap_on` is what the scheduler itself decided (`Scheduler.enable_overlap`).
    """
    mode = settings.mode or "off"
    parts = [f"zos-sglang {__version__}: mode {mode}, SGLang {sglang_version or installed()}"]
    alone = loop_left_alone(server_args)
    if overlap_on:
        held = " in SGLang, held to one step at a time by mode sync" if mode == "sync" else ""
        parts.append(f"overlap on{held}")
    else:
        reason = why_overlap_is_off(server_args) or alone or UNKNOWN
        parts.append(f"overlap off because of {reason}")
    if alone:
        parts.append(f"{alone} runs as SGLang has it: zos-sglang leaves it alone")
    elif not overlap_on:
        parts.append("SGLang's synchronous loop runs unchanged")
    return "; ".join([", ".join(parts[:2]), *parts[2:]])


def _resolved(server_args: Any, field: str) -> Any:
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, field)


def _asked_for(server_args: Any, field: str) -> bool:
    """Whether the user set the flag: resolution never writes to the raw input."""
    raw = getattr(server_args, "_raw_input", None)
    return bool(raw[field] if raw is not None else getattr(server_args, field, False))


def _uses_mlx() -> bool:
    from sglang.srt.hardware_backend.mlx.runtime import use_mlx

    return bool(use_mlx())
