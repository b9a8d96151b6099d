"""Configurations with a loop of their own: upstream's dispatch starts that loop, and one line says so.

`Scheduler.run_event_loop` and the dispatch behind it are upstream's own, on a scheduler that has no more than
they read. Its loops are stand-ins that tell which of them was called.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler as upstream
from sglang.srt.server_args import ServerArgs

from tests.unit.test_overlap_off import GPT2, SDAR
from zos_sglang.settings import Settings
from zos_sglang.upstream import entry, hooks, overlap_off

LOOPS = (
    *("event_loop_normal", "event_loop_overlap", "event_loop_pp", "event_loop_pdmux"),
    "event_loop_overlap_mlx",
)
#: What each configuration gives: flags, whether MLX is there, the loop, and what the line says.
CASES = {
    "pipeline-parallel": (
        {"pp_size": 2},
        False,
        "event_loop_pp",
        "the pipeline-parallel loop (event_loop_pp:",
    ),
    "pdmux": (
        {"enable_pdmux": True, "disable_overlap_schedule": True, "chunked_prefill_size": -1},
        False,
        "event_loop_pdmux",
        "the PD-multiplexing loop (event_loop_pdmux:",
    ),
    "mlx": ({}, True, "event_loop_overlap_mlx", "the MLX loop (event_loop_overlap_mlx:"),
}


@pytest.fixture(autouse=True)
def environment_restored():
    """Resolution writes to os.environ; put it back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Scheduler:
    """What `run_event_loop` and the dispatch read, and loops that note their names."""

    run_event_loop = upstream.Scheduler.run_event_loop

    def __init__(self, args, mlx):
        off = overlap_off._resolved(args, "disable_overlap_schedule")
        self.server_args, self.ran = args, []
        self.enable_overlap, self.enable_overlap_mlx = not off and not mlx, not off and mlx
        self.enable_pdmux = bool(args.enable_pdmux)
        self.disaggregation_mode = DisaggregationMode.NULL
        self.device = "cpu"
        self.schedule_stream = SimpleNamespace()
        self.device_module = SimpleNamespace(StreamContext=lambda stream: contextlib.nullcontext())
        self.metrics_reporter = SimpleNamespace(start_scheduler_time_accounting=lambda: None)
        self.tp_group = SimpleNamespace(rank_in_group=0)
        self.pp_group = SimpleNamespace(is_first_rank=True)

    def __getattr__(self, name):
        if name not in LOOPS:
            raise AttributeError(name)
        return lambda: self.ran.append(name)


@pytest.fixture
def start(tmp_path, monkeypatch, caplog):
    """Run a configuration's start as the plugin does; returns the loops that ran and our log lines."""

    def run(flags, mlx=False, config=GPT2):
        (tmp_path / "config.json").write_text(json.dumps(config))
        args = ServerArgs(model_path=str(tmp_path), device="cpu", attention_backend="torch_native", **flags)
        args.resolve_once()
        monkeypatch.setattr(upstream, "use_mlx", lambda: mlx)
        monkeypatch.setattr("sglang.srt.hardware_backend.mlx.runtime.use_mlx", lambda: mlx)
        monkeypatch.setattr(upstream, "get_parallel", lambda: SimpleNamespace(pp_size=args.pp_size))
        monkeypatch.setattr(upstream.triton_load_watch, "install", lambda: None)
        monkeypatch.setattr(upstream.triton_load_watch, "mark_serving_started", lambda: None)
        monkeypatch.setattr(entry.runtime, "settings", Settings(mode="resident"))
        monkeypatch.setattr(entry.runtime, "scheduler", None)
        caplog.set_level(logging.INFO)
        scheduler = Scheduler(args, mlx)
        entry.around_run_event_loop(Scheduler.run_event_loop, scheduler)
        return scheduler.ran, [r.getMessage() for r in caplog.records if r.name.startswith("zos_sglang")]

    return run


@pytest.mark.parametrize("name", CASES)
def test_a_loop_of_its_own_starts_and_one_line_names_it_and_why(start, name):
    flags, mlx, loop, words = CASES[name]
    ran, said = start(flags, mlx)
    assert ran == [loop]
    (line,) = said
    assert "mode resident" in line and "overlap off because of" in line
    assert words in line and line.endswith(") runs as SGLang has it: zos-sglang leaves it alone")


def test_a_diffusion_llm_starts_the_loop_without_overlap_and_one_line_says_why(start):
    ran, said = start({"dllm_algorithm": "LowConfidence"}, config=SDAR)
    assert ran == ["event_loop_normal"]
    (line,) = said
    assert "overlap off because of diffusion LLM (--dllm-algorithm)" in line
    assert line.endswith("SGLang's synchronous loop runs unchanged")


def test_without_any_of_them_the_loop_that_we_replace_starts(start):
    ran, said = start({})
    assert ran == ["event_loop_overlap"]
    assert len(said) == 1 and said[0].endswith("overlap on")


def test_no_hook_of_ours_stands_in_a_loop_that_is_left_alone():
    targets = {hook.target.rpartition(".")[2] for hook in hooks.HOOKS}
    assert targets & set(LOOPS) == {"event_loop_normal", "event_loop_overlap"}


def test_a_loop_that_is_left_alone_cannot_be_switched(start):
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    start({"pp_size": 2})
    handlers = entry.after_update_handlers({}, None)
    for key in ("zos_mode", "zos_consecutive_prefill"):
        with pytest.raises(UpdateRejected, match="does not run an event loop of zos-sglang"):
            handlers[key].validate(key, 1)
