"""Which upstream rule turned the overlap schedule off, and the start-up line that says so.

SGLang resolves its server arguments by a chain of rules, and keeps each decision beside the name
of the rule that took it (`_resolved_overrides`, pickled into the scheduler process). We read that
record. Deriving the conditions again would go wrong with the first release that changes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from zos_sglang import __version__
from zos_sglang.settings import Settings
from zos_sglang.upstream.versions import installed

FIELD = "disable_overlap_schedule"
SGLANG, OURS, YOURS = "SGLang", "zos-sglang", "you"


@dataclass(frozen=True)
class Rule:
    """One rule that turns overlap or the lane off.

    `code` is its short name, `flag` the flag or variable it looks at, `whose` code holds it (SGLang,
    zos-sglang, or you: a flag that asks for it), `where` the function or file, `words` what it says, and
    `change` what to do about it.
    """

    code: str
    flag: str
    whose: str
    where: str
    words: str
    change: str

    def as_json(self) -> dict[str, str]:
        """All of it as plain data."""
        return asdict(self)


#: SGLang's rules by the name under which its resolution records them.
RULES = {
    rule.where: rule
    for rule in (
        Rule(
            "pipeline-parallel",
            "--pp-size",
            SGLANG,
            "_pipeline_parallel_overlap_disable",
            "pipeline parallelism (--pp-size above 1)",
            "use --pp-size 1 and spread the model with --tp-size",
        ),
        Rule(
            "mamba-no-buffer",
            "--mamba-radix-cache-strategy",
            SGLANG,
            "_mamba_radix_cache_resolution",
            "the no_buffer Mamba cache "
            "(--mamba-radix-cache-strategy; this model or its --linear-attn-backend has no extra_buffer)",
            "take a --linear-attn-backend that has extra_buffer, or --disable-radix-cache",
        ),
        Rule(
            "sparse-head",
            "SGLANG_EMBEDDINGS_SPARSE_HEAD",
            SGLANG,
            "_sparse_head_overlap_disable",
            "sparse-head embeddings (SGLANG_EMBEDDINGS_SPARSE_HEAD)",
            "unset SGLANG_EMBEDDINGS_SPARSE_HEAD",
        ),
        Rule(
            "diffusion-llm",
            "--dllm-algorithm",
            SGLANG,
            "_dllm_overlap_disable",
            "diffusion LLM (--dllm-algorithm)",
            "nothing: SGLang runs diffusion LLMs without overlap",
        ),
        Rule(
            "speculation-on-cpu",
            "--speculative-algorithm",
            SGLANG,
            "_disable_overlap_schedule_for_cpu",
            "speculation on CPU (--speculative-algorithm)",
            "leave --speculative-algorithm out, or serve on an accelerator",
        ),
        Rule(
            "mps",
            "--device",
            SGLANG,
            "_handle_mps_backends",
            "the MPS device without MLX",
            "set SGLANG_USE_MLX=1, or serve on another device",
        ),
    )
}
BY_USER = "--disable-overlap-schedule"
UNKNOWN = "an upstream rule that zos-sglang does not know"

_ASKED_FOR = Rule("asked-for", BY_USER, YOURS, "the command line", BY_USER, f"leave {BY_USER} out")


def overlap_rules(server_args: Any) -> list[Rule]:
    """Every rule that turned overlap off; none while it is on.

    `server_args` is resolved (after `resolve_once`, or as the scheduler process gets it). All are
    named: undoing only one of two would leave overlap off.
    """
    if not _resolved(server_args, FIELD):
        return []
    found = [_ASKED_FOR] if _asked_for(server_args, FIELD) else []
    for source, declared in getattr(server_args, "_resolved_overrides", None) or ():
        if declared.get(FIELD):
            found.append(RULES.get(source) or _unknown(source))
    return list(dict.fromkeys(found)) or [_unknown(None)]


def why_overlap_is_off(server_args: Any) -> str | None:
    """The rules that turned overlap off, in words, or None while it is on."""
    return " and ".join(rule.words for rule in overlap_rules(server_args)) or None


def rules_of_running(server_args: Mapping[str, Any]) -> list[Rule]:
    """The rules of a running server that has overlap off, from `/server_info`, which keeps no history.

    What the user asked for stands in its command line; the other rules stand only in its start-up line.
    """
    if not server_args.get(FIELD):
        return []
    asked = BY_USER in str(server_args.get("launch_command") or "").split()
    where = "its start-up line, 'overlap off because of', names the rule"
    return [_ASKED_FOR] if asked else [replace(_unknown(None), words="a rule of SGLang", change=where)]


def mode_rules(mode: str) -> list[Rule]:
    """What our own mode turns off: the lane in all but `resident`, overlap in `sync`."""
    words = {
        "off": "mode off: SGLang runs as it is",
        "sync": "mode sync: one step at a time",
        "stock": "mode stock: SGLang's own loop runs",
        "overlap": "mode overlap: our loop without the lane",
    }.get(mode)
    if words is None:
        return []
    return [Rule(f"mode-{mode}", "--zos-mode, ZOS_MODE", YOURS, "settings", words, "--zos-mode resident")]


def loop_rule(server_args: Any) -> Rule | None:
    """Why upstream runs another event loop than the one we replace, or None.

    Same order as upstream's dispatch: the disaggregation role first, then the others. Diffusion LLMs have
    none of their own: they run the loop without overlap, which `overlap_rules` explains.

    `server_args` is resolved, or the arguments of a running server as `/server_info` has them.
    """
    role = _resolved(server_args, "disaggregation_mode")
    if role not in (None, "null"):
        if (_resolved(server_args, "pp_size") or 1) > 1:
            return _loop(
                "pipeline-parallel",
                "--pp-size",
                f"the pipeline-parallel loop of the {role} role",
                "use --pp-size 1",
            )
        return None
    if _resolved(server_args, "enable_pdmux"):
        return _loop(
            "pdmux",
            "--enable-pdmux",
            "the PD-multiplexing loop (event_loop_pdmux: prefill and decode share the device at once)",
            "leave --enable-pdmux out",
        )
    if (_resolved(server_args, "pp_size") or 1) > 1:
        return _loop(
            "pipeline-parallel",
            "--pp-size",
            "the pipeline-parallel loop (event_loop_pp: micro-batches pass from stage to stage)",
            "use --pp-size 1 and spread the model with --tp-size",
        )
    if _uses_mlx(server_args):
        return _loop(
            "mlx",
            "SGLANG_USE_MLX",
            "the MLX loop (event_loop_overlap_mlx: MLX computes lazily and overlaps by itself)",
            "nothing: MLX has a loop of its own",
        )
    return None


def loop_left_alone(server_args: Any) -> str | None:
    """The upstream event loop that runs instead of the one we replace, or None."""
    rule = loop_rule(server_args)
    return rule.words if rule else None


def _loop(code: str, flag: str, words: str, change: str) -> Rule:
    return Rule(code, flag, SGLANG, "dispatch_event_loop", words, change)


def _unknown(source: str | None) -> Rule:
    return Rule(
        "unknown",
        "unknown",
        SGLANG,
        source or "unknown",
        f"{UNKNOWN} ({source})" if source else UNKNOWN,
        "look the rule up in SGLang, and report it to zos-sglang",
    )


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
    role = _resolved(server_args, "disaggregation_mode")
    if role not in (None, "null"):
        parts.append(f"{role} role of disaggregation")
    if alone:
        parts.append(f"{alone} runs as SGLang has it: zos-sglang leaves it alone")
    elif not overlap_on:
        parts.append("SGLang's synchronous loop runs unchanged")
    return "; ".join([", ".join(parts[:2]), *parts[2:]])


def _resolved(server_args: Any, field: str) -> Any:
    if isinstance(server_args, Mapping):
        return server_args.get(field)
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, field)


def _asked_for(server_args: Any, field: str) -> bool:
    """Whether the user set the flag: resolution never writes to the raw input."""
    raw = getattr(server_args, "_raw_input", None)
    return bool(raw[field] if raw is not None else getattr(server_args, field, False))


def _uses_mlx(server_args: Any) -> bool:
    if isinstance(server_args, Mapping):
        return False  # a variable of the server's environment, which it does not tell
    from sglang.srt.hardware_backend.mlx.runtime import use_mlx

    return bool(use_mlx())
