"""What a client saw of one answer: everything that is compared, and nothing that is not.

Times, request ids and the grouping of tokens into network chunks are left out on purpose: stock
itself does not repeat them. The order and completeness of a stream are kept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Record:
    """One answer (one choice of one request); `name` is unique within its scenario.

    `token_ids` is None where the endpoint does not report ids. `prefix_of` names the record of
    the same scenario that holds the full answer: then this one was cut short at a moment that
    timing chose, and must begin as that one does and have finish reason "abort" (the full answer
    may have a lower length limit, to save time). `loose` answers
    were cut by a lost connection or a pause that stock does not repeat: only faults count.
    `rank` counts the answers of the scenario in the order in which they ended; it is not compared.
    """

    name: str
    sent: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    error: str | None = None
    text: str = ""
    token_ids: list[int] | None = None
    finish: Any = None
    usage: dict[str, int] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    logprobs: Any = None
    vectors: Any = None
    boundaries: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    prefix_of: str | None = None
    loose: bool = False
    retractions: int = 0
    rank: int = 0

    @property
    def finish_type(self) -> str | None:
        """Finish reason as one word: stop, length, abort, or None."""
        return self.finish.get("type") if isinstance(self.finish, dict) else self.finish

    @property
    def tokens(self) -> int:
        """Completion tokens of this answer (0 where the endpoint reports none)."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return int(self.usage.get("completion_tokens") or 0)

    def as_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self)


# Answers of one scenario on one server, in the order in which they were asked for.
Records = dict[str, Record]
