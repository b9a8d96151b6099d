"""What became of one request, and whether that is allowed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from zos_sglang.testing.compare.records import Record
from zos_sglang.testing.soak.plan import Ask
from zos_sglang.testing.soak.truth import Expected

#: What the server says when it ends a request by itself, and the outcome that this is.
_OWN_WORDS = (("timeout reached", "timed out"), ("queue is full", "refused"), ("higher priority", "refused"))
#: Of a prompt in chunks an abort is told in these words, a time limit's too: upstream's
#: `Scheduler.process_pending_chunked_abort` does not keep the reason. Only the time then tells them apart.
IN_CHUNKS = "Abort in waiting queue"
#: The server's clock starts when a request arrives there: a limit is early below this part of it.
_EARLY = 0.95
_KEPT = 50


@dataclass
class Tally:
    """Everything that came back. `wrong` are sentences; `broken` says why the server counts as gone."""

    requests: int = 0
    output_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    retractions: int = 0
    wrong: list[str] = field(default_factory=list)
    wrong_count: int = 0
    broken: str | None = None
    longest_s: float = 0.0

    def fault(self, sentence: str) -> None:
        """Count a fault; the first ones are kept."""
        self.wrong_count += 1
        if len(self.wrong) < _KEPT:
            self.wrong.append(sentence)


@dataclass(frozen=True)
class Life:
    """Of one request: seconds from asking to the end, and whether everything was aborted meanwhile."""

    seconds: float
    all_aborted: bool


def outcome_of(ask: Ask, answer: Record, life: Life, timeout_s: float) -> tuple[str, str | None]:
    """In one word how the request ended, and what is wrong with that (None if it may end so)."""
    words = f"{answer.error or ''} {answer.finish or ''}"
    for phrase, outcome in _OWN_WORDS:
        if phrase in words:
            early = outcome == "timed out" and life.seconds < timeout_s * _EARLY
            return outcome, f"timed out after {life.seconds:.1f} s" if early else None
    if answer.status == 200 and answer.finish_type in ("stop", "length"):
        return "finished", None
    if answer.finish_type == "abort" or (answer.status and answer.status != 200):
        if ask.cut == "abort" or life.all_aborted:
            return "aborted", None
        if IN_CHUNKS in words and life.seconds >= timeout_s * _EARLY:
            return "timed out", None
        fault = f"HTTP {answer.status}, aborted by nobody after {life.seconds:.1f} s: {words.strip()[:200]}"
        return "aborted", fault
    return "lost", f"HTTP {answer.status}, no finish reason: {words.strip()[:200]}"


def faults_of(ask: Ask, answer: Record, wanted: Expected, prompt: int, outcome: str) -> list[str]:
    """What is wrong with the tokens of one answer."""
    found = list(answer.faults)
    ids = answer.token_ids or []
    if ids != wanted.ids[: len(ids)]:
        both = zip(ids, wanted.ids, strict=False)
        first = next((i for i, (got, want) in enumerate(both) if got != want), len(wanted.ids))
        found.append(f"token {first} of {len(ids)} is {ids[first]}, not that of stock")
    if outcome == "finished":
        if len(ids) != len(wanted.ids):
            found.append(f"{len(ids)} tokens, {len(wanted.ids)} expected")
        if answer.finish_type not in wanted.finish:
            found.append(f"finish reason {answer.finish_type}, not {'/'.join(sorted(wanted.finish))}")
        if answer.usage.get("prompt_tokens") != prompt:
            found.append(f"{answer.usage.get('prompt_tokens')} prompt tokens counted, {prompt} sent")
    counted = answer.usage.get("completion_tokens")
    if counted is not None and counted != len(ids):
        found.append(f"{counted} completion tokens counted, {len(ids)} received")
    return [f"{ask.rid} ({'stream' if ask.stream else 'whole'}, cut {ask.cut}): {what}" for what in found]
