"""What to change on a server, from what it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zos_sglang.observe.names import Block
from zos_sglang.overlap.guards import Reason
from zos_sglang.resident.eligibility import Departure, Refusal

#: Steps below which nothing is advised from counts.
ENOUGH = 64
#: Share of steps from which a reason is worth a line.
WORTH = 0.05
#: What the model must promise before another mode is advised.
CLEARLY = 0.1
SWITCH = 'POST /set_internal_state {"server_args": {"zos_mode": "%s"}}'

REASONS: dict[str, str] = {
    Reason.CONSECUTIVE_PREFILL: "Prefills wait for each other. ZOS_CONSECUTIVE_PREFILL=never overlaps them, "
    "at the price of a later first token.",
    Reason.FIRST_TOKEN: "Prefills wait while a client waits for its first token. That is the default; "
    "ZOS_CONSECUTIVE_PREFILL=never trades first tokens for throughput.",
    Reason.GRAMMAR_SYNC: "Structured output under this kind of speculation needs the tokens of the step "
    "before; so it runs one step at a time.",
    Reason.MODE_SYNC: "Mode sync runs one step at a time: " + SWITCH % "resident",
    Reason.GUARD_FAILED: "A guard failed; its error stands in the server's log. Please report it.",
    Reason.EARLY_FIRST_TOKEN: "First tokens that are there go out before the next step is launched. "
    "ZOS_FIRST_TOKEN=in-order sends them after it.",
    Reason.OVERLAP_OFF: "SGLang's synchronous loop runs. Start without what turns overlap off (above).",
}
BLOCKS: dict[str, str] = {
    Block.HOST_LENGTHS: "The attention backend reads lengths on the host, so launches wait for the step "
    "before. --attention-backend triton or fa3 does not.",
    Block.COPY: "The copy of tokens to the host holds results up: look for other traffic on the PCIe bus.",
    Block.CPU_BOUND: "The scheduler's thread is slower than the device. The resident lane makes its steps "
    "shorter; larger batches make the device's longer.",
}
REFUSALS: dict[str, str] = {
    Refusal.GRAMMAR: "Batches stay out of the lane while a grammar is compiled. Requests that use the same "
    "schema again find it compiled, until the cache is flushed.",
    Refusal.GRAMMAR_BACKEND: "The lane fills masks of xgrammar and llguidance: --grammar-backend xgrammar.",
    Refusal.LOGPROBS: "Requests with return_logprob keep their whole batch out of the lane.",
    Refusal.PENALTIES: "Requests with penalties keep their whole batch out of the lane.",
    Refusal.LOGIT_PROCESSOR: "Custom logit processors keep their whole batch out of the lane.",
    Refusal.HIDDEN_STATES: "Requests for hidden states keep their whole batch out of the lane.",
    Refusal.CHUNKED_PREFILL: "Chunked prefills keep the lane closed: with a larger --chunked-prefill-size "
    "there are fewer.",
    Refusal.ADMISSION_OPEN: "Requests wait although there is room: more KV memory (--mem-fraction-static) "
    "admits them sooner.",
    Refusal.CLOSED_FOR_GOOD: "The lane failed and stays closed; its error stands in the server's log. "
    "Please report it.",
}
DEPARTURES: dict[str, str] = {
    Departure.INTAKE: "Every arrival leaves the lane once. That is its design; a poll by top or a scraper of "
    "/server_info is an arrival, too.",
    Departure.POOL_FULL: "The KV pool is full: give it more memory, or lower --max-running-requests.",
    Departure.FAULT: "The lane failed; its error stands in the server's log. Please report it.",
}


def advise(found: Mapping[str, Any]) -> list[str]:
    """Lines of advice for what `doctor_server.examine` found, the most important first."""
    lines: list[str] = []
    if not found["asynchronous"]:
        lines.append(
            "The device works on the scheduler's own thread (CPU): steps overlap in their order only, and no "
            "time is saved. What this server shows of times does not hold for a GPU."
        )
    if found["faults"]:
        lines.append(
            "Recording failed and has stopped; its error stands in the server's log. Please report it."
        )
    if found["mode"] in ("stock", "overlap") and found["loop"] != "normal":
        lines.append(f"The resident lane is not asked for: {SWITCH % 'resident'}")
    if found["steps"] < ENOUGH:
        return [*lines, f"Only {found['steps']} steps are recorded: send some traffic, then ask again."]
    for reasons, key, texts in (
        (found["reasons"], "reason", REASONS),
        (found["blocks"], "block", BLOCKS),
    ):
        worth = [one[key] for one in reasons if one["share"] >= WORTH and one[key] in texts]
        # What another mode did before a switch is past.
        lines += [texts[word] for word in worth if word != Reason.MODE_SYNC or found["mode"] == "sync"]
    lane = found["lane"]
    if lane["state"] == "open":
        decode = max(1, lane["decode_steps"])
        refused, left = _worth(lane["refused"], decode), _worth(lane["left"], decode)
        lines += [REFUSALS[word] for word in refused if word in REFUSALS]
        lines += [DEPARTURES[word] for word in left if word in DEPARTURES]
    lines += [
        text
        for word, text in DEPARTURES.items()
        if word == Departure.FAULT and lane["left"].get(word) and text not in lines
    ]
    if found["asynchronous"]:
        lines += _faster(found)
    return lines or ["Nothing to change: what can overlap does."]


def _worth(counts: Mapping[str, int], of: int) -> list[str]:
    return [word for word, count in sorted(counts.items(), key=lambda one: -one[1]) if count / of >= WORTH]


def _faster(found: Mapping[str, Any]) -> list[str]:
    """Modes that the model says would be clearly faster than the one that was measured."""
    lines = []
    for name, one in found["what_if"].items():
        measured = one["measured"].get(found["mode"])
        for mode in ("overlap", "resident"):
            predicted = one["predicted"].get(mode)
            if measured and predicted and mode != found["mode"] and predicted[1] < measured * (1 - CLEARLY):
                lines.append(
                    f"{name}: by the model, mode {mode} takes {predicted[0]:.0f} to {predicted[1]:.0f} us a "
                    f"step instead of {measured:.0f}."
                )
    return lines
