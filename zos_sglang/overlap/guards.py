"""One decision per launch: may it overlap with the result that is still pending, and why (not)?

Three guards, in this order:

1. consecutive prefill, outside DP attention: a rule over the two batches (`PrefillRule`);
   under DP attention: a rule over values that are equal on all ranks (`RankEqual`), because ranks
   that decide differently deadlock (sglang issues 20315 and 20853);
2. grammar sync: speculation, a grammar that the verify step cannot advance by itself, decode;
3. the mode: `sync` never overlaps.

Upstream's counterpart is `Scheduler.is_disable_overlap_for_batch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from zos_sglang.overlap.protocols import Batch


class Reason(StrEnum):
    """Why a launch overlapped or not. Closed: there is no `other`."""

    OVERLAPPED = "overlapped"
    NOTHING_PENDING = "nothing-pending"
    CONSECUTIVE_PREFILL = "consecutive-prefill"
    FIRST_TOKEN = "first-token"
    GRAMMAR_SYNC = "grammar-sync"
    MODE_SYNC = "mode-sync"
    GUARD_FAILED = "guard-failed"
    OVERLAP_OFF = "overlap-off"


class PrefillRule(StrEnum):
    """What to do with a prefill that follows a prefill (`ZOS_CONSECUTIVE_PREFILL`)."""

    NEVER = "never"
    ALWAYS = "always"
    FIRST_TOKEN = "first-token"


@dataclass(frozen=True, slots=True)
class OverlapDecision:
    """`overlap` False means: process the pending result before this launch."""

    overlap: bool
    reason: Reason


# The decisions are constants: a step allocates nothing to decide.
OVERLAPPED = OverlapDecision(True, Reason.OVERLAPPED)
NOTHING_PENDING = OverlapDecision(True, Reason.NOTHING_PENDING)
CONSECUTIVE_PREFILL = OverlapDecision(False, Reason.CONSECUTIVE_PREFILL)
FIRST_TOKEN = OverlapDecision(False, Reason.FIRST_TOKEN)
GRAMMAR_SYNC = OverlapDecision(False, Reason.GRAMMAR_SYNC)
MODE_SYNC = OverlapDecision(False, Reason.MODE_SYNC)
GUARD_FAILED = OverlapDecision(False, Reason.GUARD_FAILED)


class RankEqual(NamedTuple):
    """All that a rule may see under DP attention: equal on every rank by upstream's MLP sync."""

    is_extend_in_batch: bool


def dp_prefill_guard(rule: PrefillRule, batch: RankEqual, pending: RankEqual) -> OverlapDecision | None:
    """Consecutive prefill under DP attention. `first-token` needs values that ranks do not share.

    Returns:
        A decision against overlap, or None to let the next guard speak.
    """
    if rule is PrefillRule.ALWAYS and batch.is_extend_in_batch and pending.is_extend_in_batch:
        return CONSECUTIVE_PREFILL
    return None


def someone_waits_for_first_token(pending: Batch) -> bool:
    """Does the pending prefill produce a token that a client waits for?

    A middle chunk of a long prompt produces none, nor does a prefill-only request (`max_new_tokens` 0).
    Of the others, those are waited for that stream, or that end with this token: their answer is complete.
    """
    for req in pending.reqs:
        if req.inflight_middle_chunks > 0 or req.finished():
            continue
        if req.stream or req.sampling_params.max_new_tokens == 1:
            return True
    return False


def prefill_guard(rule: PrefillRule, batch: Batch, pending: Batch) -> OverlapDecision | None:
    """Consecutive prefill outside DP attention. Mixed batches count as prefill, as upstream's do."""
    if rule is PrefillRule.NEVER:
        return None
    if not (batch.forward_mode.is_extend() and pending.forward_mode.is_extend()):
        return None
    if rule is PrefillRule.ALWAYS:
        return CONSECUTIVE_PREFILL
    return FIRST_TOKEN if someone_waits_for_first_token(pending) else None


def grammar_guard(batch: Batch) -> OverlapDecision | None:
    """The FSM must advance over the pending tokens before this batch's bitmask is built.

    Only host-drafted speculation needs it: without speculation sampling is delayed instead, and
    algorithms with `supports_grammar_overlap()` use the barrier inside verify.
    """
    if batch.spec_algorithm.is_none() or not batch.forward_mode.is_decode():
        return None
    return GRAMMAR_SYNC if batch.grammar_needs_sync() else None


def make_guard(
    rule: PrefillRule, *, dp_attention: bool, sync: bool = False
) -> Callable[[Batch, Any], OverlapDecision]:
    """Build the decision function of one event loop.

    Args:
        rule: the consecutive-prefill rule.
        dp_attention: upstream's `require_mlp_sync`; the rule then sees `RankEqual` values only.
        sync: mode `sync`: nothing ever overlaps.

    Returns:
        `decide(batch, pending)`, called once per launch; `pending` is the batch whose result waits
        in the queue, or None.
    """
    if sync:
        return lambda batch, pending: MODE_SYNC

    def decide(batch: Batch, pending: Any) -> OverlapDecision:
        if pending is None:
            return NOTHING_PENDING
        if dp_attention:
            against = dp_prefill_guard(
                rule, RankEqual(batch.is_extend_in_batch), RankEqual(pending.is_extend_in_batch)
            )
        else:
            against = prefill_guard(rule, batch, pending)
        return against or grammar_guard(batch) or OVERLAPPED

    return decide
