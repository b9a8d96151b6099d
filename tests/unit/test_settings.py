"""Settings: what the environment may say, what it may not, and what people are told."""

import string
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zos_sglang import settings_page
from zos_sglang.modes import MODE_CODES, MODES, mode_from_code
from zos_sglang.settings import Settings, SettingsError, env_name, rows

ALL_NAMES = {env_name(field) for field in Settings.model_fields}

any_settings = st.builds(
    Settings,
    mode=st.sampled_from([None, "overlap"]),
    strict=st.booleans(),
    consecutive_prefill=st.sampled_from([None, "never", "always", "first-token"]),
    exit_timeout_s=st.floats(0, 14),
    stall_timeout_s=st.floats(0, 86400),
    debug_future_map=st.booleans(),
    wait=st.sampled_from(["block", "spin", "poll"]),
    record=st.booleans(),
)


def refusal(environ, **kwargs):
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ, **kwargs)
    return str(caught.value)


def test_an_empty_environment_leaves_the_plugin_inert():
    settings = Settings.from_env({"PATH": "/bin"})
    assert settings.mode is None
    assert (settings.exit_timeout_s, settings.stall_timeout_s) == (10.0, 120.0)
    assert (settings.wait, settings.first_token) == ("block", "early")
    assert not (settings.strict or settings.debug_future_map)


def test_values_are_read_with_their_types():
    settings = Settings.from_env(
        {
            "ZOS_MODE": "overlap",
            "ZOS_STRICT": "1",
            "ZOS_CONSECUTIVE_PREFILL": "always",
            "ZOS_EXIT_TIMEOUT_S": "2.5",
            "ZOS_STALL_TIMEOUT_S": "0",
            "ZOS_WAIT": "spin",
            "ZOS_RECORD": "false",
        }
    )
    assert settings == Settings(
        mode="overlap",
        strict=True,
        consecutive_prefill="always",
        exit_timeout_s=2.5,
        stall_timeout_s=0.0,
        wait="spin",
        record=False,
    )


def test_settings_cannot_be_changed_after_they_are_made():
    with pytest.raises(ValueError, match="frozen"):
        Settings().mode = "off"


def test_an_unknown_name_is_refused_with_its_value_and_the_nearest_name():
    message = refusal({"ZOS_STALL_TIMEOUT": "7"})
    assert "ZOS_STALL_TIMEOUT=7" in message
    assert "Did you mean ZOS_STALL_TIMEOUT_S?" in message
    assert all(name in message for name in ALL_NAMES)


def test_an_unknown_name_is_refused_even_when_it_is_empty():
    assert "ZOS_MOD=" in refusal({"ZOS_MOD": ""})


@given(st.text(string.ascii_uppercase + "_", min_size=1).map(lambda s: "ZOS_" + s))
def test_no_name_outside_the_table_is_accepted(name):
    if name not in ALL_NAMES:
        assert name in refusal({name: "1"})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ZOS_MODE", "overlpa", "off, sync, stock, overlap, resident. Did you mean overlap?"),
        ("ZOS_MODE", "OVERLAP", "Did you mean overlap?"),
        ("ZOS_CONSECUTIVE_PREFILL", "first", "never, always, first-token. Did you mean first-"),
        ("ZOS_STRICT", "maybe", "0 or 1"),
        ("ZOS_EXIT_TIMEOUT_S", "15", "a number from 0 to 14"),
        ("ZOS_EXIT_TIMEOUT_S", "-1", "a number from 0 to 14"),
        ("ZOS_STALL_TIMEOUT_S", "nan", "a number from 0 to 86400"),
        ("ZOS_STALL_TIMEOUT_S", "inf", "a number from 0 to 86400"),
        ("ZOS_STALL_TIMEOUT_S", "10s", "a number from 0 to 86400"),
        ("ZOS_WAIT", "sleep", "block, spin, poll"),
        ("ZOS_RECORD", "2", "0 or 1"),
    ],
)
def test_a_bad_value_is_refused_with_name_value_and_what_is_allowed(name, value, told):
    message = refusal({name: value})
    assert f"{name}={value}: not allowed" in message
    assert told in message


def test_all_problems_are_told_at_once():
    message = refusal({"ZOS_MODE": "x", "ZOS_WAIT": "y", "ZOS_NO": "z"})
    assert len(message.splitlines()) == 3


def test_an_empty_value_counts_as_unset():
    assert Settings.from_env({"ZOS_MODE": "", "ZOS_WAIT": "  "}) == Settings()


def test_a_prefill_rule_contradicts_mode_off():
    message = refusal({"ZOS_MODE": "off", "ZOS_CONSECUTIVE_PREFILL": "never"})
    assert "ZOS_CONSECUTIVE_PREFILL=never contradicts ZOS_MODE=off" in message
    assert "ZOS_MODE=sync|stock|overlap" in message


@pytest.mark.parametrize("mode", ["sync", "stock"])
def test_a_prefill_rule_may_wait_in_a_mode_that_can_become_overlap_live(mode):
    environ = {"ZOS_MODE": mode, "ZOS_CONSECUTIVE_PREFILL": "never"}
    assert Settings.from_env(environ).consecutive_prefill == "never"


def test_watching_contradicts_mode_off_only():
    name = "ZOS_DEBUG_FUTURE_MAP"
    assert f"{name}=1 contradicts ZOS_MODE=off" in refusal({"ZOS_MODE": "off", name: "1"})
    assert Settings.from_env({"ZOS_MODE": "off", name: "0"}).mode == "off"
    assert Settings.from_env({"ZOS_MODE": "stock", name: "1"}).mode == "stock"


def test_going_back_to_stock_needs_no_other_variable_removed():
    environ = {
        "ZOS_STRICT": "1",
        "ZOS_WAIT": "spin",
        "ZOS_EXIT_TIMEOUT_S": "1",
        "ZOS_STALL_TIMEOUT_S": "5",
    }
    assert Settings.from_env({**environ, "ZOS_MODE": "off"}).mode == "off"


def test_without_a_mode_nothing_contradicts():
    assert Settings.from_env({"ZOS_CONSECUTIVE_PREFILL": "never"}).mode is None


def test_a_flag_beats_its_variable():
    settings = Settings.load({"ZOS_MODE": "stock", "ZOS_WAIT": "spin"}, {"mode": "sync"})
    assert (settings.mode, settings.wait) == ("sync", "spin")


def test_a_flag_is_named_as_a_flag_in_the_message():
    message = refusal({"ZOS_MODE": "stock"}, flags={"mode": "overlpa"})
    assert message.startswith("--zos-mode=overlpa: not allowed")


def test_a_contradiction_names_each_side_as_it_was_given():
    message = refusal({"ZOS_CONSECUTIVE_PREFILL": "never"}, flags={"mode": "off"})
    assert "ZOS_CONSECUTIVE_PREFILL=never contradicts --zos-mode=off" in message


def test_the_default_mode_gives_way_to_flag_and_variable():
    assert Settings.load({}, default_mode="overlap").mode == "overlap"
    assert Settings.load({"ZOS_MODE": "stock"}, default_mode="overlap").mode == "stock"
    assert Settings.load({}, {"mode": "off"}, default_mode="overlap").mode == "off"


@given(any_settings, any_settings)
def test_child_processes_read_back_what_was_exported(settings, older):
    environ = {"PATH": "/bin"}
    older.export(environ)
    settings.export(environ)
    assert Settings.from_env(environ) == settings
    assert environ["PATH"] == "/bin"


def test_rows_say_value_default_range_and_source():
    table = {r.name: r for r in rows({"ZOS_WAIT": "spin"}, {"mode": "stock"})}
    assert set(table) == ALL_NAMES
    assert (table["ZOS_WAIT"].value, table["ZOS_WAIT"].source) == ("spin", "environment")
    assert (table["ZOS_MODE"].value, table["ZOS_MODE"].source) == ("stock", "flag")
    exit_row = table["ZOS_EXIT_TIMEOUT_S"]
    assert (exit_row.value, exit_row.default, exit_row.source) == (10.0, 10.0, "default")
    assert (exit_row.type, exit_row.allowed) == ("number", "a number from 0 to 14")
    assert exit_row.flag == "--zos-exit-timeout-s"
    assert all(row.help for row in table.values())


def test_every_mode_has_one_number_and_back():
    assert set(MODE_CODES) == set(MODES)
    assert {mode_from_code(code) for code in MODE_CODES.values()} == set(MODES)
    assert mode_from_code(2.0) == "stock"
    assert mode_from_code(2.5) is None
    assert mode_from_code(9) is None


def test_the_page_of_settings_is_what_the_code_says():
    stored = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert stored == settings_page.page(), "python -m zos_sglang settings --markdown > docs/settings.md"


def test_a_row_of_the_page_has_name_flag_allowed_default_and_help():
    row = replace(rows({})[0], allowed="a|b", default=None)
    line = settings_page.table([row])[-1]
    assert line == f"| `{row.name}`<br>`{row.flag}` | a\\|b | unset | {row.help} |"
