"""The scheduling modes, and the numbers on the wire of everything that is switched live by its name.

SGLang's ``SetInternalStateReq`` carries numbers only, so a live switch travels as the mode's
or the rule's code. This is the one place that knows the pairs.
"""

from typing import Literal, get_args

from zos_sglang.overlap.guards import PrefillRule

Mode = Literal["off", "sync", "stock", "overlap", "resident"]

MODES: tuple[Mode, ...] = get_args(Mode)

MODE_CODES: dict[Mode, int] = {"off": 0, "sync": 1, "stock": 2, "overlap": 3, "resident": 4}

_BY_CODE = {code: name for name, code in MODE_CODES.items()}


def mode_from_code(code: float) -> Mode | None:
    """The mode's name, or None when `code` is no mode's number (2.5, 7, nan)."""
    return _BY_CODE.get(code)  # type: ignore[call-overload]


RULE_CODES: dict[PrefillRule, int] = {
    PrefillRule.NEVER: 0,
    PrefillRule.ALWAYS: 1,
    PrefillRule.FIRST_TOKEN: 2,
}

_RULES = {code: rule for rule, code in RULE_CODES.items()}


def rule_from_code(code: float) -> PrefillRule | None:
    """The consecutive-prefill rule, or None when `code` is no rule's number."""
    return _RULES.get(code)  # type: ignore[call-overload]
