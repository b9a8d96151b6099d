"""`docs/settings.md`: the settings as a page, written from the code that reads them."""

from __future__ import annotations

from collections.abc import Iterable

from zos_sglang.settings import NOT_WITH_OFF, Row, as_text, env_name, rows

_HEAD = """\
<!-- Written by `python -m zos_sglang settings --markdown`; a test fails where it differs. -->

# Settings

`python -m zos_sglang settings` prints this table with the current values and where they come from; `--json`
for programs, `--markdown` for this page. A flag of `zos_sglang.launch_server` beats its environment
variable. An empty value counts as unset.

"""

_TAIL = """
An unknown `ZOS_*` name or a bad value stops the start with one message that names the setting, its value and
what is allowed. So does a setting that mode `off` would ignore: {ignored}.
If no mode is set at all, the plugin stays inactive and that message is a warning in the log.

What the modes are and when to choose which: [modes.md](modes.md).
"""


def page() -> str:
    """The whole page, with the defaults: it says nothing of the environment that writes it."""
    ignored = ", ".join(f"`{env_name(field)}`" for field in NOT_WITH_OFF)
    return _HEAD + "\n".join(table(rows({}))) + "\n" + _TAIL.format(ignored=ignored)


def table(settings: Iterable[Row]) -> list[str]:
    """Lines of the table, one a setting."""
    head = ["| variable, flag | allowed | default | what it does |", "|---|---|---|---|"]
    return head + [_line(row) for row in settings]


def _line(row: Row) -> str:
    default = "unset" if row.default is None else as_text(row.default)
    cells = (f"`{row.name}`<br>`{row.flag}`", row.allowed, default, row.help)
    # A bar would begin another cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
