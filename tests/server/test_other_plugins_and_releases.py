"""Where the plugin must step aside, and the other ways to start SGLang."""

import json
import os
import subprocess
import sys

import pytest

from tests.server.conftest import entry_points
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.server import ServerFailed, cpu_args, cpu_env

pytestmark = pytest.mark.server

RIVAL = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.managers.scheduler import Scheduler

originals = [Scheduler.event_loop_overlap]  # in a list: the registry patches every module's names

def loop(scheduler):
    print("rival loop runs", flush=True)
    return originals[0](scheduler)

def register():
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.event_loop_overlap", loop, HookType.REPLACE
    )
"""

ENGINE = """
import json, sys
import sglang

def main():
    engine = sglang.Engine(model_path=sys.argv[1], device="cpu", dtype="float32", max_total_tokens=4096)
    answer = engine.generate("hello", {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True})
    state = engine.get_server_info()["internal_states"][0]
    tokens = answer["meta_info"]["completion_tokens"]
    print("ANSWER " + json.dumps([tokens, state.get("zos", {}).get("mode")]))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


LOOKS_ON = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def after_run_batch(result, scheduler, batch, *_):
    print("run_batch seen", flush=True)

def register():
    target = "sglang.srt.managers.scheduler.Scheduler.run_batch"
    HookRegistry.register(target, after_run_batch, HookType.AFTER)
"""


def run(command: list[str], env: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture
def rival(tmp_path):
    (tmp_path / "rival_plugin.py").write_text(RIVAL)
    return distribution(tmp_path, "rival", "1.0", entry_points("rival_plugin"))


def test_a_rival_plugin_makes_ours_step_aside_with_one_warning(serve, client_of, rival):
    server = serve("overlap", rival)
    client = client_of(server)
    assert client.generate("hello", 4)["meta_info"]["completion_tokens"] == 4
    assert client.zos() is None
    log = server.log_text()
    assert log.count("zos-sglang is inactive, stock SGLang runs: plugin rival replaces") == 1
    assert "rival loop runs" in log
    assert client.set_state(zos_mode="sync").status_code == 400
    assert client.generate("hello", 4)["meta_info"]["completion_tokens"] == 4


def test_a_rival_plugin_stops_a_strict_start_with_its_name(serve, rival):
    with pytest.raises(ServerFailed, match=r"plugin rival replaces .*event_loop_overlap"):
        serve("overlap", {**rival, "ZOS_STRICT": "1"})


def test_a_plugin_that_watches_launches_still_sees_every_one(serve, client_of, tmp_path):
    (tmp_path / "watching_plugin.py").write_text(LOOKS_ON)
    env = distribution(tmp_path, "watching", "1.0", entry_points("watching_plugin"))
    client = client_of(serve("overlap", env))
    assert client.generate("hello", 6)["meta_info"]["completion_tokens"] == 6
    zos = client.zos()
    launches = sum(zos["reasons"].values())
    assert launches == zos["paths"]["upstream-launch"] > 0
    assert client.server.log_text().count("run_batch seen") == launches


def test_an_unsupported_release_stops_our_launcher(serve, tmp_path):
    with pytest.raises(ServerFailed, match=r"SGLang 9\.9\.9 is not supported") as failure:
        serve("overlap", distribution(tmp_path, "sglang", "9.9.9"))
    assert "code 2" in str(failure.value)


def test_an_unsupported_release_leaves_stock_running_with_one_warning(serve, client_of, tmp_path):
    env = {**distribution(tmp_path, "sglang", "9.9.9"), "ZOS_MODE": "overlap"}
    client = client_of(serve(None, env))
    assert client.generate("hello", 4)["meta_info"]["completion_tokens"] == 4
    assert client.zos() is None
    assert "zos-sglang is inactive, stock SGLang runs: SGLang 9.9.9" in client.server.log_text()


def test_without_zos_mode_the_installed_plugin_does_nothing(serve, client_of):
    client = client_of(serve(None))
    assert client.zos() is None
    assert "zos-sglang" not in client.server.log_text()
    assert client.set_state(zos_mode=1).json() == [False]


def test_sglang_serve_runs_our_loop_when_zos_mode_is_set(serve, client_of):
    client = client_of(serve(None, {"ZOS_MODE": "overlap"}))
    assert client.zos()["mode"] == "overlap"
    assert client.generate("hello", 4)["meta_info"]["completion_tokens"] == 4
    assert client.zos()["reasons"]["overlapped"] > 0


def test_the_engine_runs_our_loop_when_zos_mode_is_set(tiny_model, tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    env = {**os.environ, **cpu_env(), "ZOS_MODE": "overlap"}
    done = run([sys.executable, str(script), str(tiny_model)], env, 300)
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    assert json.loads(line[7:]) == [4, "overlap"]


def test_overlap_turned_off_by_a_flag_is_said_at_start_and_stock_runs(serve, client_of):
    client = client_of(serve("overlap", args=("--disable-overlap-schedule",)))
    assert client.generate("hello", 4)["meta_info"]["completion_tokens"] == 4
    log = client.server.log_text()
    assert "overlap off because of --disable-overlap-schedule" in log
    assert client.set_state(zos_mode="stock").status_code == 400


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model-path", "/no/such/model"], "--model-path /no/such/model: there is no such"),
        (["--zos-mode", "overlp"], "Did you mean overlap?"),
        (["--zos-moed", "overlap"], "Did you mean --zos-mode?"),
        (["--zos-mode", "off", "--zos-consecutive-prefill", "never"], "contradicts"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(tiny_model, extra, message):
    command = [sys.executable, "-m", "zos_sglang.launch_server", "--model-path", str(tiny_model)]
    env = {**os.environ, **cpu_env()}
    done = run([*command, *cpu_args(), *extra], env, 120)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
