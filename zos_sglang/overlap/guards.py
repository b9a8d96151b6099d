"""One decision per launch: may it overlap with the result that is still pending, and why (not)?

In this order:

1. the mode: `sync` never overlaps; nothing pending: nothing to wait for;
2. consecutive prefill, outside DP attention: a rule over the two batches (`PrefillRule`);
   under DP attention: a rule over values that are equal on all ranks (`RankEqual`), because ranks
   that decide differently deadlock (sglang issues 20315 and 20853);
3. grammar sync: speculation, a grammar that the verify step cannot advance by itself, decode;
4. early first token, unless tokens shall go out in order: `first_token_is_there`, see `EventLoop`.

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
    EARLY_FIRST_TOKEN = "early-first-token"


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
EARLY_FIRST_TOKEN = OverlapDecision(False, Reason.EARLY_FIRST_TOKEN)
MODE_SYNC = OverlapDecision(False, Reason.MODE_SYNC)
GUARD_FAILED = OverlapDecision(False, Reason.GUARD_FAILED)


class RankEqual(NamedTuple):
    """All that a rule may see under DP attention: equal on every rank by upstream's MLP sync.

    Both were gathered when the batch was selected: whether any rank prefills in this step, and whether some
    rank's prefill owes a token that a client waits for.
    """

    is_extend_in_batch: bool
    first_token_due: bool = False

    @classmethod
    def of(cls, batch: Batch) -> RankEqual:
        return cls(bool(batch.is_extend_in_batch), bool(getattr(batch, DUE_MARK, False)))


#: Where the exchange of the ranks leaves the second value on a batch. No mark: nobody gathered it.
DUE_MARK = "zos_first_token_due"


def dp_prefill_guard(rule: PrefillRule, batch: RankEqual, pending: RankEqual) -> OverlapDecision | None:
    """Consecutive prefill under DP attention, for all ranks alike.

    Returns:
        A decision against overlap, or None to let the next guard speak.
    """
    if rule is PrefillRule.NEVER or not (batch.is_extend_in_batch and pending.is_extend_in_batch):
        return None
    if rule is PrefillRule.ALWAYS:
        return CONSECUTIVE_PREFILL
    return FIRST_TOKEN if pending.first_token_due else None


def _is_waited_for(req: Any) -> bool:
    """Of requests that get a token, those are waited for that stream, or that end with this token."""
    return not req.finished() and (req.stream or req.sampling_params.max_new_tokens == 1)


def someone_waits_for_first_token(pending: Batch) -> bool:
    """Does the pending prefill produce a token that a client waits for?

    A middle chunk of a long prompt produces none, nor does a prefill-only request (`max_new_tokens` 0).
    """
    return any(req.inflight_middle_chunks <= 0 and _is_waited_for(req) for req in pending.reqs)


def someone_will_wait_for_first_token(batch: Batch) -> bool:
    """The same of a prefill that has just been selected and not been launched.

    The chunks before it may still be in flight, so the count of them says nothing yet.
    """
    return any(req is not batch.chunked_req and _is_waited_for(req) for req in batch.reqs)


def first_token_is_there(batch: Batch, pending: Batch, result: Any) -> bool:
    """Before a decode step: is the pending prefill computed, and does a client wait for its token?

    The device has nothing to do then until the launch, so processing first takes no overlap away. By a query
    of this rank's device: ranks may see different things, so this is for a scheduler without others.
    """
    kind = pending.forward_mode
    if kind.is_mixed() or not (kind.is_extend() and batch.forward_mode.is_decode()):
        return False
    # It reads the tokens that its request has got so far, in SGLang without the one that is pending.
    if batch.sampling_info.has_custom_logit_processor:
        return False
    done = result.copy_done
    return (done is None or done.query()) and someone_waits_for_first_token(pending)


def _never_quick(batch: Batch) -> bool:
    """Kernel by kernel: what is taken for granted where nothing else is known of `batch`."""
    return False


def prefill_guard(
    rule: PrefillRule,
    batch: Batch,
    pending: Batch,
    quick: Callable[[Batch], bool] = _never_quick,
    mixed_waits: bool = True,
) -> OverlapDecision | None:
    """Consecutive prefill outside DP attention. Mixed batches count as prefill, as upstream's do.

    A mixed batch has decode rows of the pending one, prepared already; with a cache on the host it does not
    wait (`upstream.host_cache`).

    A prefill that is launched sooner than the device computes one (`quick`) holds no first token up: its
    thread waits for the pending result after the launch anyway. To wait before only leaves the device idle.
    """
    if rule is PrefillRule.NEVER:
        return None
    if not (batch.forward_mode.is_extend() and pending.forward_mode.is_extend()):
        return None
    if not mixed_waits and batch.forward_mode.is_mixed():
        return None
    if rule is PrefillRule.ALWAYS:
        return CONSECUTIVE_PREFILL
    return FIRST_TOKEN if someone_waits_for_first_token(pending) and not quick(batch) else None


def grammar_guard(batch: Batch) -> OverlapDecision | None:
    """The FSM must advance over the pending tokens before this batch's bitmask is built.

    Only host-drafted speculation needs it: without speculation sampling is delayed instead, and
    algorithms with `supports_grammar_overlap()` use the barrier inside verify.
    """
    if batch.spec_algorithm.is_none() or not batch.forward_mode.is_decode():
        return None
    return GRAMMAR_SYNC if batch.grammar_needs_sync() else None


def make_guard(
    rule: PrefillRule,
    *,
    dp_attention: bool,
    sync: bool = False,
    quick: Callable[[Batch], bool] = _never_quick,
    mixed_waits: bool = True,
) -> Callable[[Batch, Any], OverlapDecision]:
    """Build the decision function of one event loop.

    Args:
        rule: the consecutive-prefill rule.
        dp_attention: upstream's `require_mlp_sync`; the rule then sees `RankEqual` values only.
        sync: mode `sync`: nothing ever overlaps.
        quick: whether a prefill is launched as one graph, by what all ranks know alike.
        mixed_waits: whether a mixed batch may wait for a pending prefill.

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
            against = dp_prefill_guard(rule, RankEqual.of(batch), RankEqual.of(pending))
        else:
            against = prefill_guard(rule, batch, pending, quick, mixed_waits)
        return against or grammar_guard(batch) or OVERLAPPED

    return decide
