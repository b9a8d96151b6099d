"""Will the resident lane open on a server with these arguments? Asked before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.lane_conditions import CONDITIONS
from zos_sglang.upstream.lane_facts import COVERED_BACKENDS, Condition, Facts
from zos_sglang.upstream.overlap_off import OURS, Rule


def forecast(facts: Facts, backend_is_open: bool = False) -> list[Rule]:
    """Everything that keeps the lane closed for the whole server, as far as it is known before the start.

    `backend_is_open`: the attention backend is not decided here (`backend_is_open`), so it refuses nothing.
    """
    found = [_rule(condition) for condition in CONDITIONS if condition.applies(facts)]
    if backend_is_open:
        found = [rule for rule in found if rule.code != Refusal.ATTENTION_BACKEND]
    return [*found, *_rival()]


def backend_is_open(facts: Facts, server_args: Any, device_here: bool) -> bool:
    """Whether SGLang will choose the attention backend by a device that is not in this machine.

    Args:
        facts: of the resolved arguments.
        server_args: the record itself, for who decided what.
        device_here: whether the device that `facts` are about is in this machine.
    """
    raw = getattr(server_args, "_raw_input", None) or {}
    given = any(raw.get(f"{phase}attention_backend") for phase in ("", "prefill_", "decode_"))
    return not (facts.on_cpu or device_here or given)


def unresolved(facts: Facts, backend_is_open: bool) -> list[str]:
    """What the flags leave open, one sentence each."""
    found = []
    if backend_is_open:
        found.append(
            "--attention-backend: SGLang chooses it by the GPU, and there is none of this kind here. On "
            "Hopper it takes fa3, where the lane opens; on other GPUs trtllm_mha, fa4, flashinfer or triton, "
            f"of which the lane opens only with {COVERED_BACKENDS[0]}. Give --attention-backend to be sure."
        )
    window = getattr(getattr(facts.model, "hf_text_config", None), "sliding_window", None)
    if window and not facts.model.is_hybrid_swa:
        found.append(
            f"sliding_window {window} in the model's configuration: the model's code decides whether it has "
            "one, and with one the lane stays closed."
        )
    return found


def explain(refusal: str, arguments: Mapping[str, Any]) -> list[Rule]:
    """Which flags of a running server stand behind a refusal that it reports.

    Args:
        refusal: the word of a Refusal.
        arguments: the server's resolved arguments by name, as `/server_info` has them.
    """
    facts = Facts(SimpleNamespace(**arguments), None, False)
    found = [
        _rule(condition)
        for condition in CONDITIONS
        # Variables of this process are not the server's.
        if condition.refusal == refusal and condition.flag.startswith("--") and _applies(condition, facts)
    ]
    change = "its log says why: 'the resident lane stays closed'"
    return found or [Rule(refusal, "unknown", OURS, "upstream/lane_build.py", refusal, change)]


def _applies(condition: Condition, facts: Facts) -> bool:
    try:
        return bool(condition.applies(facts))
    except AttributeError:  # a question about the model, or about an argument that this server does not have
        return False


def facts_of(server_args: Any) -> Facts:
    """Facts of resolved arguments."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    model = model_config_of(server_args)
    return Facts(resolved_view(server_args), model, bool(uses_ssm_state(model)))


def _rule(condition: Condition) -> Rule:
    where = "upstream/port.py" if condition.refusal is Refusal.UPSTREAM_LAUNCH else "upstream/lane_build.py"
    return Rule(condition.refusal.value, condition.flag, OURS, where, condition.words, condition.change)


def _rival() -> list[Rule]:
    from zos_sglang.upstream import hooks

    rival = hooks.lane_rival()
    if rival is None:
        return []
    change = "choose the plugins to load with SGLANG_PLUGINS"
    return [Rule(Refusal.OTHER_PLUGIN.value, "SGLANG_PLUGINS", OURS, "upstream/hooks.py", rival, change)]
