"""`doctor`: flags through SGLang's own resolution, and what is made of a server's records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.made_records import records, steady
from tests.unit.observed_server import info_of, served
from tests.unit.test_overlap_off import GPT2, MAMBA, SDAR
from zos_sglang import __main__ as cli
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.names import Block
from zos_sglang.observe.remote import Server
from zos_sglang.observe.tools import advice, doctor_flags, doctor_server
from zos_sglang.overlap.guards import Reason
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Departure, Refusal
from zos_sglang.testing.server import cpu_env
from zos_sglang.upstream import hooks, overlap_off, resolve_flags

TRITON = ("--device", "cuda", "--attention-backend", "triton")
CPU = ("--device", "cpu", "--attention-backend", "torch_native")
QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}


@pytest.fixture(autouse=True)
def environment_restored() -> Iterator[None]:
    """Resolution writes to os.environ; put it back. Nothing of ours is set before."""
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith(("ZOS_", "SGLANG_"))]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


Examine = Callable[..., dict[str, Any]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return tmp_path


@pytest.fixture
def examine(model: Path) -> Examine:
    """What `doctor` says of flags."""

    def run(*flags: str, config: dict[str, Any] = GPT2) -> dict[str, Any]:
        folder = model / config["model_type"]  # SGLang remembers what it read in a folder
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        found = doctor_flags.examine(["--model-path", str(folder), *flags])
        return json.loads(json.dumps(found))

    return run


def doctor(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a process of its own: SGLang chooses its platform once."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "zos_sglang", "doctor", *words],
        env={**os.environ, **env},
        check=False,
        capture_output=True,
        text=True,
    )


def codes(part: dict[str, Any]) -> list[str]:
    return [rule["code"] for rule in part["rules"]]


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("device", [TRITON, CPU])
def test_by_default_everything_is_on(device: tuple[str, ...], examine: Examine) -> None:
    found = examine(*device)
    assert found["overlap"] == {"on": True, "rules": []}
    assert found["lane"] == {"state": "open", "rules": []}
    assert (found["mode"], found["loop"]) == ("resident", "the loop of zos-sglang")
    assert found["unresolved"] == []


def test_fa3_is_covered_and_other_backends_are_not(examine: Examine) -> None:
    assert examine("--device", "cuda", "--attention-backend", "fa3")["lane"]["state"] == "open"
    closed = examine("--device", "cuda", "--attention-backend", "flashinfer")
    assert codes(closed["lane"]) == ["attention-backend"] and closed["overlap"]["on"]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU: nothing is open")
def test_without_the_device_what_it_decides_stays_open(examine: Examine) -> None:
    found = examine("--device", "cuda")
    assert found["lane"] == {"state": "depends", "rules": []} and not found["device_here"]
    assert found["attention_backend"]["open"]
    (line,) = found["unresolved"]
    assert "--attention-backend" in line and "Hopper" in line


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_without_any_device_cuda_is_assumed(examine: Examine) -> None:
    found = examine()
    assert (found["device"], found["device_assumed"]) == ("cuda", True)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_without_any_device_it_says_what_runs_on_a_cpu(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--model-path", str(model)]) == 0
    text = capsys.readouterr().out
    assert "It cannot start here as it is: There is no accelerator here." in text
    assert "python -m zos_sglang.testing.server MODEL" in text


def test_a_cpu_without_its_engine_is_told_what_it_lacks(model: Path) -> None:
    found = doctor(["--model-path", str(model), *CPU], {})
    assert found.returncode == 0
    assert "It cannot start here as it is: --device cpu needs SGLang's CPU engine" in found.stdout
    assert "python -m zos_sglang.testing.server MODEL" in found.stdout


def test_a_cpu_with_our_platform_lacks_nothing(model: Path) -> None:
    found = doctor(["--model-path", str(model), *CPU, "--json"], cpu_env())
    assert json.loads(found.stdout)["lacking"] is None


def test_a_platform_that_is_not_installed_is_one_line(model: Path) -> None:
    found = doctor(["--model-path", str(model), *CPU], {"SGLANG_PLATFORM": "no-such"})
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert "SGLANG_PLATFORM=no-such" in found.stderr


@pytest.mark.parametrize(
    ("flags", "overlap", "lane"),
    [
        (("--disable-overlap-schedule",), ["asked-for"], ["asked-for"]),
        (("--pp-size", "2"), ["pipeline-parallel"], ["pipeline-parallel"]),
        (("--zos-mode", "overlap"), [], ["mode-overlap"]),
        (("--zos-mode", "sync"), ["mode-sync"], ["mode-sync"]),
        (("--zos-mode", "off"), [], ["mode-off"]),
        (("--enable-priority-scheduling",), [], ["selection"]),
        (("--prefill-decode-interval", "2"), [], ["selection"]),
        (("--enable-forward-pass-metrics",), [], ["upstream-launch"]),
        (("--dcp-size", "2", "--tp-size", "2"), [], ["kv-pool"]),
        (("--enable-lora", "--lora-paths", "a=b", "--max-lora-rank", "8"), [], ["lora-server"]),
        (("--enable-hierarchical-cache",), [], ["host-cache"]),
        (("--enable-mfu-metrics", "--enable-metrics"), [], ["diagnostics"]),
        (("--page-size", "16"), [], []),
        (("--disable-cuda-graph",), [], []),
    ],
)
def test_every_rule_is_named(
    flags: tuple[str, ...], overlap: list[str], lane: list[str], examine: Examine
) -> None:
    found = examine(*TRITON, *flags)
    assert (codes(found["overlap"]), codes(found["lane"])) == (overlap, lane)
    assert found["overlap"]["on"] is not bool(overlap)
    assert found["lane"]["state"] == ("closed" if lane else "open")
    for rule in found["overlap"]["rules"] + found["lane"]["rules"]:
        assert all(rule.values())


def test_all_rules_are_named_at_once(examine: Examine) -> None:
    found = examine(*TRITON, "--pp-size", "2", "--disable-overlap-schedule", "--enable-priority-scheduling")
    assert codes(found["overlap"]) == ["asked-for", "pipeline-parallel"]
    assert codes(found["lane"]) == ["asked-for", "pipeline-parallel", "selection"]
    assert found["loop"].startswith("the pipeline-parallel loop (event_loop_pp:")
    whose = {rule["code"]: rule["whose"] for rule in found["lane"]["rules"]}
    assert whose == {"asked-for": "you", "pipeline-parallel": "SGLang", "selection": "zos-sglang"}


def test_speculation_on_the_cpu_turns_both_off(examine: Examine) -> None:
    found = examine(*CPU, "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
    assert codes(found["overlap"]) == ["speculation-on-cpu"]
    assert "speculation" in codes(found["lane"]) and found["loop"] == "SGLang's synchronous loop"


def test_pd_multiplexing_is_named_with_its_loop(examine: Examine) -> None:
    found = examine(
        *TRITON, *("--enable-pdmux", "--disable-overlap-schedule"), *("--chunked-prefill-size", "-1")
    )
    assert found["loop"].startswith("the PD-multiplexing loop (event_loop_pdmux:")
    assert codes(found["overlap"]) == ["asked-for"] and codes(found["lane"]) == ["asked-for", "pdmux"]


def test_mlx_is_named_with_its_loop(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_off, "_uses_mlx", lambda _: True)
    found = examine(*TRITON)
    assert found["loop"].startswith("the MLX loop (event_loop_overlap_mlx:")
    assert codes(found["lane"]) == ["mlx"] and found["lane"]["state"] == "closed"


def test_a_diffusion_llm_is_named_and_runs_the_loop_without_overlap(examine: Examine) -> None:
    found = examine(*CPU, "--dllm-algorithm", "LowConfidence", config=SDAR)
    assert codes(found["overlap"]) == ["diffusion-llm"] and found["loop"] == "SGLang's synchronous loop"
    assert "diffusion-llm" in codes(found["lane"])


def test_the_lane_opens_in_the_decode_role_of_disaggregation_and_not_in_the_prefill_role(
    examine: Examine,
) -> None:
    decode = examine(*TRITON, "--disaggregation-mode", "decode")
    assert decode["lane"]["state"] == "open" and decode["overlap"]["on"]
    prefill = examine(*TRITON, "--disaggregation-mode", "prefill")
    assert codes(prefill["lane"])[0] == "disaggregation" and prefill["overlap"]["on"]


def test_kinds_of_models_keep_the_lane_closed(examine: Examine) -> None:
    assert "kv-pool" in codes(examine(*TRITON, "--disable-radix-cache", config=MAMBA)["lane"])
    assert codes(examine(*TRITON, config=QWEN2_VL)["lane"]) == ["model"]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_what_only_the_device_can_resolve_is_told(examine: Examine) -> None:
    with pytest.raises(ToolError, match=r"Mamba.*There is no cuda device here, which may be the reason"):
        examine(*TRITON, config=MAMBA)


def test_a_window_that_only_the_models_code_knows_is_left_open(examine: Examine) -> None:
    found = examine(*TRITON, config={**GPT2, "model_type": "gpt2", "sliding_window": 128})
    assert "sliding_window 128" in found["unresolved"][0] and found["lane"]["state"] == "open"


def test_a_variable_of_sglang_counts(examine: Examine) -> None:
    os.environ["SGLANG_TEST_RETRACT"] = "1"
    assert codes(examine(*TRITON)["lane"]) == ["diagnostics"]


def test_another_plugin_on_the_lane_counts(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "lane_rival", lambda: "plugin rival wraps something")
    (rule,) = examine(*TRITON)["lane"]["rules"]
    assert (rule["code"], rule["words"]) == ("other-plugin", "plugin rival wraps something")


def test_the_environments_mode_counts(examine: Examine) -> None:
    os.environ["ZOS_MODE"] = "stock"
    found = examine(*TRITON)
    assert (found["mode"], found["loop"]) == ("stock", "SGLang's own loop")


def test_a_config_file_counts(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("disable-overlap-schedule: true\n")
    assert codes(examine(*TRITON, "--config", str(tmp_path / "server.yaml"))["overlap"]) == ["asked-for"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--tensor-paralel-size", "2"), "knows no such flag. Did you mean --tensor-parallel-size?"),
        (("--tp-size", "x"), "argument --tp-size/--tensor-parallel-size: invalid int value: 'x'"),
        (("--tp-size", "2", "more"), "more: no flag before this word takes it"),
        (("--zos-mod", "sync"), "--zos-mod: there is no such flag."),
        (("--zos-mode", "x"), "--zos-mode=x: not allowed."),
        (("--use-ray",), "--use-ray"),
        (("--config", "/no/such.yaml"), "/no/such.yaml"),
        (("--pp-size", "2", "--speculative-algorithm", "NOPE"), "SGLang refuses these flags: "),
        (("--model-path", "/no/such/model"), "there is no such file or folder"),
        (("--model-path", os.path.dirname(__file__)), "no config.json in this folder"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(
    flags: tuple[str, ...], complaint: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--model-path", str(model), *CPU, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and complaint in err and err.startswith("zos-sglang: error: ") and err.count("\n") == 1


def test_a_configuration_that_cannot_be_read_is_one_line(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text("{")
    assert cli.main(["doctor", "--model-path", str(model), *CPU]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_nothing_to_examine_is_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert "name a server" in capsys.readouterr().err


def test_an_address_and_flags_together_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "http://127.0.0.1:1", "--tp-size", "2"]) == 2
    assert "stands alone; what is --tp-size for?" in capsys.readouterr().err


def test_json_of_flags_is_all_that_is_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--model-path", str(model), "--json", *TRITON, "--pp-size", "2"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["overlap"]["on"] is False and err == ""


def test_the_text_names_flag_owner_and_change(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--model-path", str(model), *TRITON, "--pp-size", "2"]) == 0
    text = capsys.readouterr().out
    for part in ("--pp-size", "SGLang, _pipeline_parallel_overlap_disable", "use --pp-size 1", "closed"):
        assert part in text


def test_resolution_leaves_logging_as_it_was(examine: Examine) -> None:
    import logging

    examine(*CPU)
    assert logging.root.manager.disable == logging.NOTSET
    with pytest.raises(resolve_flags.FlagsError):
        resolve_flags.resolve(["--no-such-flag"])
    assert logging.root.manager.disable == logging.NOTSET


# ---------------------------------------------------------------- a server


def server_of(info: dict[str, Any]) -> Server:
    zos = info["internal_states"][0]["zos"]
    return Server("http://there", info, zos, zos["steps"], 1)


def seen(made: Any = None, **more: Any) -> dict[str, Any]:
    found = doctor_server.examine(
        server_of(info_of(steady(200, gpu=10, cpu=4) if made is None else made, **more))
    )
    return json.loads(json.dumps(found))


def test_a_server_that_overlaps_is_said_to() -> None:
    found = seen(mode="resident")
    assert found["overlap"] == {"on": True, "rules": []} and found["lane"]["state"] == "open"
    assert found["paths"] == {"overlap": {"steps": 200, "share": 1.0}} == found["since_start"]
    assert [sign["verdict"] for sign in found["signs"]] == ["with"] * 4
    assert found["advice"] == ["Nothing to change: what can overlap does."]


def test_reasons_have_their_cost_for_such_a_step_and_spread_over_all() -> None:
    fast, slow = steady(300, gpu=10, cpu=4), steady(100, gpu=10, cpu=4, overlap=False)
    slow["step"] += 300
    for name in [n for n in slow.dtype.names or () if n.startswith("t_")]:
        slow[name] += fast["t_output"][-1]
    slow["reason"], slow["mode"] = 3, fast["mode"][0]
    import numpy as np

    (one,) = seen(np.concatenate([fast, slow]))["reasons"]
    assert (one["reason"], one["steps"], one["share"]) == (Reason.CONSECUTIVE_PREFILL, 100, 0.25)
    assert one["cost_us"] > 1000 and one["us_a_step"] == round(one["cost_us"] / 4, 1)


def test_steps_with_nothing_pending_are_no_overlap() -> None:
    found = seen(steady(100, gpu=10, cpu=4, reason=["nothing-pending"] * 40 + ["overlapped"] * 60))
    assert found["since_start"] == found["paths"]
    assert found["paths"]["nothing-pending"]["share"] == 0.4


def test_the_users_flag_is_named_for_a_server_without_overlap() -> None:
    given = {"disable_overlap_schedule": True, "launch_command": "x --disable-overlap-schedule --tp 1"}
    found = seen(mode="normal", loop="normal", arguments=given)
    assert not found["overlap"]["on"] and codes(found["overlap"]) == ["asked-for"]
    assert found["lane"]["state"] == "closed"


def test_another_rule_is_looked_up_where_the_server_says_it() -> None:
    given = {"disable_overlap_schedule": True, "launch_command": "x --pp-size 2"}
    assert codes(seen(mode="normal", loop="normal", arguments=given)["overlap"]) == ["unknown"]
    rule = dict(code="c", flag="f", whose="SGLang", where="w", words="its words", change="its change")
    found = seen(mode="normal", loop="normal", arguments=given, zos={"overlap_off": [rule]})
    assert found["overlap"]["rules"] == [rule]


@pytest.mark.parametrize("mode", ["sync", "stock", "overlap"])
def test_a_mode_without_the_lane_is_named(mode: str) -> None:
    found = seen(mode=mode)
    assert codes(found["lane"]) == [f"mode-{mode}"]
    assert found["overlap"]["on"] is (mode != "sync")


def test_a_refusal_of_the_server_is_led_back_to_its_flag() -> None:
    lane = LaneAccount()
    lane.refused[Refusal.SELECTION] = 1
    lane.refused[Refusal.GRAMMAR] = 7
    found = seen(mode="resident", lane=lane, arguments={"prefill_decode_interval": 2})
    (rule,) = found["lane"]["rules"]
    assert (rule["code"], rule["flag"]) == ("selection", "--prefill-decode-interval")
    assert found["lane"]["refused"] == {"grammar": 7} and found["lane"]["state"] == "closed"


def test_a_refusal_that_no_flag_explains_points_to_the_log() -> None:
    lane = LaneAccount()
    lane.refused[Refusal.OUTPUT_PATH] = 1
    (rule,) = seen(mode="resident", lane=lane)["lane"]["rules"]
    assert rule["code"] == "output-path" and "its log says why" in rule["change"]


def test_few_steps_are_no_ground_for_advice() -> None:
    (line,) = seen(records(3), mode="resident")["advice"]
    assert line == "Only 3 steps are recorded: send some traffic, then ask again."


def test_a_faster_mode_is_advised_where_the_model_has_one() -> None:
    lines = seen(steady(200, gpu=10, cpu=4, overlap=False), mode="sync")["advice"]
    assert "decode 4: by the model, mode overlap takes 10000 to 10050 us a step instead of" in " ".join(lines)


def test_on_the_cpu_no_faster_mode_is_promised() -> None:
    lines = seen(steady(200, gpu=10, cpu=4, overlap=False), mode="sync", asynchronous=False)["advice"]
    assert "no time is saved" in lines[0] and "by the model" not in " ".join(lines)


def test_what_blocked_is_advised_on() -> None:
    made = steady(100, gpu=10, cpu=4, block=["host-lengths"] * 50 + [0] * 50, blocked=500_000)
    found = seen(made, mode="resident")
    assert found["blocks"][0]["us_a_step"] == 250.0
    assert any("--attention-backend triton or fa3" in line for line in found["advice"])


@pytest.mark.parametrize("mode", ["sync", "resident"])
def test_another_mode_is_advised_where_sync_runs_not_where_it_has_run(mode: str) -> None:
    found = seen(steady(100, gpu=10, cpu=4, overlap=False, reason=["mode-sync"] * 100), mode=mode)
    assert found["reasons"][0]["reason"] == Reason.MODE_SYNC
    told = any(line.startswith("Mode sync runs one step at a time") for line in found["advice"])
    assert told is (mode == "sync")


def test_every_cause_that_someone_can_change_has_its_advice() -> None:
    """What is not here is no fault: it overlapped, or there was nothing to overlap with."""
    assert set(advice.REASONS) == set(Reason) - {Reason.OVERLAPPED, Reason.NOTHING_PENDING}
    assert set(advice.BLOCKS) == set(Block)
    assert set(advice.REFUSALS) < set(Refusal) - set(doctor_server.OF_SERVER)
    assert set(advice.DEPARTURES) < set(Departure)


def test_a_server_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    lane = LaneAccount(opened=3, decode_steps=100, steps=90)
    lane.refused[Refusal.ADMISSION_OPEN], lane.left[Departure.INTAKE] = 10, 3
    with served(info_of(steady(200, gpu=10, cpu=4), mode="resident", lane=lane)) as url:
        assert cli.main(["doctor", url]) == 0
        text = capsys.readouterr().out
        assert cli.main(["doctor", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kind"] == "server"
    for part in (
        "90.0 % of 100 decode steps",
        "refused: admission-open",
        "interval-over-gpu",
        "decode 4",
        "-> ",
    ):
        assert part in text


def test_a_server_without_steps_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with served(info_of(records(0))) as url:
        assert cli.main(["doctor", url]) == 0
    assert "No steps are recorded yet." in capsys.readouterr().out
