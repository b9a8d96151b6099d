"""The commands: what they take, what they print, and how a wrong start ends."""

import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from zos_sglang import __main__ as cli
from zos_sglang import __version__, launch_server, settings_page
from zos_sglang import cli as commands
from zos_sglang.launch_server import prepare, split
from zos_sglang.settings import Settings, SettingsError, flag_name
from zos_sglang.testing import server
from zos_sglang.upstream import preflight, versions
from zos_sglang.upstream.preflight import PreflightError, check_arguments, check_plugin, check_trace

NOWHERE = "/no/such/model"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("ZOS_", "SGLANG_PL"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def free_port():
    """Not one of the kernel's own: those it may give to any connection by the time that it is looked at."""
    return server.free_port()


@pytest.fixture
def busy_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def no_server(monkeypatch):
    """`main` up to the point where SGLang would serve; what it would be given is kept."""
    given = []
    monkeypatch.setattr(launch_server, "serve", given.append)
    monkeypatch.setattr(launch_server.os, "environ", dict(os.environ))
    return given


def fails(argv, capsys):
    """The one message that a refused start leaves."""
    assert launch_server.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zos-sglang: error: ")
    assert "Traceback" not in err
    return err


# ---- flags


def test_our_flags_are_taken_out_and_sglangs_stay_in_order():
    flags, rest = split(
        ["--model-path", "m", "--zos-mode", "sync", "--zos-record", "--tp", "2", "--zos-wait=spin"]
    )
    assert flags == {"mode": "sync", "record": "1", "wait": "spin"}
    assert rest == ["--model-path", "m", "--tp", "2"]


def test_a_switch_takes_a_value_too():
    assert split(["--zos-strict", "0"])[0] == {"strict": "0"}


def test_a_flag_of_ours_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(SettingsError, match=r"--zos-mod: .*Did you mean --zos-mode\?"):
        split(["--zos-mod=sync"])


def test_help_shows_our_group_and_sglangs_flags(capsys):
    assert launch_server.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "zero-overhead scheduling:" in text
    assert all(flag_name(field) in text for field in Settings.model_fields)
    assert "--model-path" in text
    assert "--disable-overlap-schedule" in text


def fail_with(words):
    def fail(_argv):
        raise RuntimeError(words)

    return fail


def test_a_machine_without_a_device_is_told_how_to_serve_on_a_cpu(no_server, free_port, monkeypatch, capsys):
    monkeypatch.setattr(launch_server, "serve", fail_with(f"{launch_server.NO_DEVICE} here."))
    assert fails(["--model-path", "org/model", "--port", str(free_port)], capsys).endswith(
        f"No accelerator here. {launch_server.ON_A_CPU}\n"
    )


def test_any_other_error_of_sglang_is_its_own(no_server, free_port, monkeypatch):
    monkeypatch.setattr(launch_server, "serve", fail_with("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        launch_server.main(["--model-path", "org/model", "--port", str(free_port)])


def test_the_launcher_defaults_to_resident_and_tells_child_processes(no_server, free_port):
    assert launch_server.main(["--model-path", "org/model", "--port", str(free_port)]) == 0
    assert launch_server.os.environ["ZOS_MODE"] == "resident"
    assert no_server == [["--model-path", "org/model", "--port", str(free_port)]]


def test_a_flag_beats_the_environment_for_child_processes(no_server, free_port):
    launch_server.os.environ.update(ZOS_MODE="overlap", ZOS_STRICT="1")
    argv = ["--model-path", "org/model", "--port", str(free_port)]
    assert launch_server.main([*argv, "--zos-mode", "off", "--zos-strict", "0"]) == 0
    ours = {k: v for k, v in launch_server.os.environ.items() if k.startswith("ZOS_")}
    assert ours == {"ZOS_MODE": "off"}
    assert no_server == [argv]


def test_a_config_file_holds_flags_of_both_and_the_command_line_wins(tmp_path, free_port):
    config = tmp_path / "server.yaml"
    config.write_text(
        f"model-path: org/model\nport: {free_port}\nzos-mode: stock\nzos-strict: true\n"
        "disable-radix-cache: true\n"
    )
    settings, rest = prepare(["--zos-mode", "sync", "--config", str(config)])
    assert (settings.mode, settings.strict) == ("sync", True)
    assert rest == ["--model-path", "org/model", "--port", str(free_port), "--disable-radix-cache"]


def test_a_missing_config_file_is_one_message(capsys):
    assert "/no/such.yaml" in fails(["--config", "/no/such.yaml"], capsys)


# ---- what stops a start


def test_a_bad_setting_is_one_message(capsys):
    assert "--zos-mode=overlpa: not allowed" in fails(["--zos-mode", "overlpa"], capsys)


def test_an_unknown_variable_is_one_message(capsys, monkeypatch):
    monkeypatch.setenv("ZOS_MOED", "overlap")
    assert "Did you mean ZOS_MODE?" in fails(["--model-path", "org/model"], capsys)


def test_a_missing_model_is_one_message(capsys):
    text = fails(["--model-path", NOWHERE], capsys)
    assert f"--model-path {NOWHERE}: there is no such file or folder" in text


def test_a_port_in_use_is_one_message(capsys, busy_port):
    text = fails(["--model-path", "org/model", "--port", str(busy_port)], capsys)
    assert f"--port {busy_port}: in use on 127.0.0.1" in text


def test_an_unsupported_sglang_is_one_message_and_off_still_starts(capsys, monkeypatch, no_server, free_port):
    monkeypatch.setattr(preflight, "installed", lambda: "0.5.99")
    argv = ["--model-path", "org/model", "--port", str(free_port)]
    text = fails(argv, capsys)
    assert "SGLang 0.5.99 is not supported" in text
    assert "0.5.23" in text
    assert "--zos-mode off" in text
    assert launch_server.main([*argv, "--zos-mode", "off"]) == 0


def test_source_patches_are_looked_for_in_the_package(monkeypatch, tmp_path):
    assert not versions.built_in()
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "zos_hooks.py").touch()
    place = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(versions, "find_spec", lambda name: place)
    assert versions.built_in()


def test_a_missing_sglang_is_told(monkeypatch):
    monkeypatch.setattr(preflight, "installed", lambda: None)
    with pytest.raises(PreflightError, match="SGLang is not installed"):
        preflight.check_version()


def test_the_installed_version_is_read_without_importing_sglang(monkeypatch):
    def missing(_name):
        raise versions.PackageNotFoundError

    assert versions.installed() in versions.SUPPORTED
    monkeypatch.setattr(versions, "version", missing)
    assert versions.installed() is None


def arguments(**given):
    return Namespace(**{"model_path": "org/model", "host": "127.0.0.1", "port": 0, **given})


@pytest.mark.parametrize("path", ["/x/y", "./y", "../y", "~/y", "a/b/c"])
def test_what_looks_like_a_path_must_be_there(path):
    with pytest.raises(PreflightError, match="no such file or folder"):
        check_arguments(arguments(tokenizer_path=path))


@pytest.mark.parametrize("name", ["org/model", "model", "s3://bucket/a/b", None])
def test_names_and_addresses_of_models_are_left_to_sglang(name):
    check_arguments(arguments(model_path=name))


def test_a_model_that_is_there_passes(tmp_path):
    check_arguments(arguments(model_path=str(tmp_path)))


def test_a_trace_that_cannot_be_written_is_told_before_the_start(tmp_path, monkeypatch):
    check_trace(None)
    check_trace(str(tmp_path / "trace.json"))
    with pytest.raises(PreflightError, match=r"ZOS_TRACE=.*this is a folder"):
        check_trace(str(tmp_path))
    with pytest.raises(PreflightError, match=r"there is no folder .*nowhere\. Make it"):
        check_trace(str(tmp_path / "nowhere" / "trace.json"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PreflightError, match="cannot be written to"):
        check_trace(str(tmp_path / "trace.json"))


def test_the_launcher_refuses_a_trace_that_cannot_be_written(no_server, free_port, tmp_path, capsys):
    argv = ["--model-path", "org/model", "--port", str(free_port)]
    assert launch_server.main([*argv, "--zos-trace", str(tmp_path / "no" / "trace.json")]) == 2
    assert no_server == []
    assert "there is no folder" in capsys.readouterr().err


def test_a_busy_port_does_not_matter_where_no_http_is_served(busy_port):
    check_arguments(arguments(port=busy_port, node_rank=1))
    check_arguments(arguments(port=busy_port, enable_http_worker_reuseport=True))


def test_a_port_out_of_range_is_told():
    with pytest.raises(PreflightError, match="0 to 65535"):
        check_arguments(arguments(port=70000))


def test_a_host_without_an_address_is_told():
    with pytest.raises(PreflightError, match=r"--host no\.such\.host\.invalid"):
        check_arguments(arguments(host="no.such.host.invalid"))


def test_an_address_of_another_machine_is_told():
    with pytest.raises(PreflightError, match="no address of this machine"):
        check_arguments(arguments(host="192.0.2.1"))


@pytest.mark.parametrize(
    ("number", "told"),
    [(preflight.errno.EACCES, "above 1023"), (preflight.errno.ENOBUFS, "cannot listen there")],
)
def test_other_reasons_not_to_listen_are_told(number, told):
    assert told in preflight._why_not_bound("127.0.0.1", 80, OSError(number, "no"))


# ---- will SGLang find the plugin?


def entry(name="zos", value=preflight.OUR_ENTRY, dist="zos-sglang"):
    point = EntryPoint(name, value, "group")
    return point._for(SimpleNamespace(name=dist))


def test_the_installed_distribution_is_found():
    check_plugin({})


def test_a_distribution_that_is_not_installed_is_told():
    with pytest.raises(PreflightError, match=r"pip install -e \."):
        check_plugin({}, [entry(value="other:register")], [])


def test_an_sglang_with_our_source_patches_needs_no_entry_point(monkeypatch):
    monkeypatch.setattr(preflight, "built_in", lambda: True)
    check_plugin({"SGLANG_PLUGINS": "other"}, [], [])


@pytest.mark.parametrize("listed", ["zos", "other, zos", ""])
def test_a_whitelist_with_us_passes(listed):
    check_plugin({"SGLANG_PLUGINS": listed}, [entry()], [])


def test_a_whitelist_without_us_is_told():
    with pytest.raises(PreflightError, match="SGLANG_PLUGINS=other does not list 'zos'"):
        check_plugin({"SGLANG_PLUGINS": "other"}, [entry()], [])


def test_a_platform_that_shuts_our_distribution_out_is_told():
    ours = [entry("zos_cpu", "x:y", "zos-sglang")]
    with pytest.raises(PreflightError, match="SGLANG_PLATFORM=npu"):
        check_plugin({"SGLANG_PLATFORM": "npu"}, [entry()], ours)
    check_plugin({"SGLANG_PLATFORM": "zos_cpu"}, [entry()], ours)
    check_plugin({"SGLANG_PLATFORM": "npu"}, [entry()], [entry("other", "x:y", "other")])


def test_a_platform_that_is_not_installed_is_refused():
    with pytest.raises(PreflightError, match=r"SGLANG_PLATFORM=zos_cpu: .* only npu\. .*testing\.server"):
        preflight.check_platform({"SGLANG_PLATFORM": "zos_cpu"}, [entry("npu", "x:y", "other")])
    preflight.check_platform({"SGLANG_PLATFORM": "npu"}, [entry("npu", "x:y", "other")])
    preflight.check_platform({}, [])


def test_a_start_on_a_platform_that_is_not_installed_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_PLATFORM", "no-such")
    assert launch_server.main(["--model-path", NOWHERE]) == 2
    assert capsys.readouterr().err.startswith("zos-sglang: error: SGLANG_PLATFORM=no-such: ")


# ---- python -m zos_sglang


def test_settings_as_json_say_value_and_source(capsys, monkeypatch):
    monkeypatch.setenv("ZOS_WAIT", "spin")
    assert cli.main(["settings", "--json"]) == 0
    table = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (table["ZOS_WAIT"]["value"], table["ZOS_WAIT"]["source"]) == ("spin", "environment")
    assert table["ZOS_MODE"]["value"] is None
    assert table["ZOS_EXIT_TIMEOUT_S"]["allowed"] == "a number from 0 to 14"


def test_settings_as_a_table_name_every_variable(capsys):
    assert cli.main(["settings"]) == 0
    text = capsys.readouterr().out
    assert all(f"ZOS_{field.upper()}" in text for field in Settings.model_fields)


def test_settings_as_markdown_are_the_page_whatever_the_environment_says(capsys, monkeypatch):
    monkeypatch.setenv("ZOS_LANE_RING", "9")
    assert cli.main(["settings", "--markdown"]) == 0
    assert capsys.readouterr().out == settings_page.page()
    assert "| 4 | Slots of the ring" in settings_page.page()


def test_a_value_that_looks_like_markup_is_shown_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("ZOS_MODE", "overlap")
    monkeypatch.setenv("ZOS_TRACE", "[/bold][red]x")
    assert cli.main(["settings"]) == 0
    assert "[/bold][red]x" in capsys.readouterr().out


def test_settings_that_cannot_be_used_end_with_code_2(capsys, monkeypatch):
    monkeypatch.setenv("ZOS_MODE", "x")
    assert cli.main(["settings"]) == 2
    assert "ZOS_MODE=x: not allowed" in capsys.readouterr().err


def test_patches_as_json_hold_every_hook_with_its_state(capsys):
    from zos_sglang.upstream.hooks import HOOKS

    assert cli.main(["patches", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [hook["target"] for hook in shown] == [hook.target for hook in HOOKS]
    assert all(hook["why"] and hook["remove_when"] and hook["status"] for hook in shown)


def test_patches_as_text_name_every_target_unbroken(capsys):
    from zos_sglang.upstream.hooks import HOOKS

    assert cli.main(["patches"]) == 0
    words = capsys.readouterr().out.split()
    assert all(hook.target in words for hook in HOOKS)


def test_fingerprints_of_the_installed_release_are_those_we_know(capsys):
    from zos_sglang.upstream.hooks import FINGERPRINTS

    assert cli.main(["patches", "--fingerprints"]) == 0
    release = versions.installed()
    assert json.loads(capsys.readouterr().out) == {release: FINGERPRINTS[release]}


def test_without_a_command_help_is_shown(capsys):
    assert cli.main([]) == 0
    assert "settings" in capsys.readouterr().out


def test_the_version_is_printed():
    done = subprocess.run(
        [sys.executable, "-m", "zos_sglang", "--version"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"zos-sglang {__version__}\n")


@pytest.mark.parametrize(
    "words", [["zos_sglang", "settings"], ["zos_sglang", "--help"], ["zos_sglang.launch_server", "--help"]]
)
def test_a_python_without_what_we_need_is_told_in_one_line(words):
    # -S: without the packages of this environment.
    done = subprocess.run(
        [sys.executable, "-S", "-m", *words],
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{sys.executable} has no module " in done.stderr and "pip install -e ." in done.stderr


HIDING_SGLANG = """
import runpy, sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Hides())
sys.argv = ["launch_server", "--help"]
runpy.run_module("zos_sglang.launch_server", run_name="__main__")
"""


def test_a_python_without_sglang_alone_is_told_too():
    done = subprocess.run([sys.executable, "-c", HIDING_SGLANG], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "has no module sglang" in done.stderr


@pytest.mark.parametrize("name", [None, "zos_sglang.lost", "sglang.srt.lost"])
def test_a_part_that_a_package_lacks_is_not_taken_for_a_missing_package(name, monkeypatch):
    def fail(argv):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(commands, "main", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["settings"])


def test_a_refused_start_ends_the_process_with_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "zos_sglang.launch_server", "--zos-wait", "x"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "zos-sglang: error: --zos-wait=x: not allowed. Allowed: block, spin, poll.\n"
