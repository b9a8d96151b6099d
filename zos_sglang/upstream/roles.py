"""Which role of prefill/decode disaggregation a scheduler has, and what its event loop calls things."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Role:
    """One of upstream's overlapped loops.

    `name` is upstream's word, `select` the scheduler's method that chooses the next batch, `skips_finishing`
    whether a row that ends with its pending token is left out of the next decode step.
    """

    name: str
    select: str
    skips_finishing: bool = False

    @property
    def words(self) -> str:
        return f"the {self.name} role of disaggregation"


COLOCATED = Role("null", "get_next_batch_to_run", skips_finishing=True)
PREFILL = Role("prefill", "get_next_disagg_prefill_batch_to_run")
DECODE = Role("decode", "get_next_disagg_decode_batch_to_run")

_BY_NAME = {role.name: role for role in (COLOCATED, PREFILL, DECODE)}


def role_of(scheduler: Any) -> Role:
    """The role, which can change while the server runs (--enable-pd-role-switch), between two event loops."""
    mode = getattr(scheduler, "disaggregation_mode", None)
    return COLOCATED if mode is None else _BY_NAME[mode.value]
