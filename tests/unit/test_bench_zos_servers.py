"""scripts/bench_zos.py: its two processes side by side, its prompts in English; a server of gpu_check.py."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.fake_bench import OUTPUT, PLAN, FakeServer, result_file
from zos_sglang.testing.bench import gpu, serve, zos_cli, zos_run
from zos_sglang.testing.bench.client import BenchError, Wave, prompts
from zos_sglang.testing.bench.gpu_cli import REHEARSAL
from zos_sglang.testing.bench.serve import Config
from zos_sglang.testing.bench.zos import Budget, Plan
from zos_sglang.testing.compare.prompts import ModelInfo, story
from zos_sglang.testing.models import make_tiny
from zos_sglang.testing.server import ServerFailed

# ------------------------------------------------------------------ side by side


class Process:
    """Stands in for a ServerProcess: writes down what is done to it, fails where it is told to."""

    def __init__(self, name: str, events: list[str], failures: dict[str, BaseException], log: Path) -> None:
        self.name, self.url, self.log = name, name, log
        self._events, self._failures = events, failures

    def _note(self, what: str) -> None:
        self._events.append(f"{what} {self.name}")
        if error := self._failures.get(self._events[-1]):
            raise error

    def launch(self) -> None:
        self._note("launch")

    def stop(self) -> None:
        self._note("stop")

    def __enter__(self) -> Process:
        self._note("start")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Waves(FakeServer):
    """A made-up server whose waves are written down among the events."""

    def __init__(self, name: str, events: list[str], failures: dict[str, BaseException], log: Path) -> None:
        super().__init__(log)
        self._process = Process(name, events, failures, log)

    def wave(self, input_ids: list[list[int]], output_tokens: int) -> Wave:
        self._process._note("wave of")
        return super().wave(input_ids, output_tokens)


class Run:
    """One run of both servers, made up, at batch 4; `events` is what happened in order."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.events = out, list[str]()
        self.failures: dict[str, BaseException] = {}
        self.result = result_file(out)
        (out / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
        names = ("live", "separate")
        self.servers = {n: Waves(n, self.events, self.failures, out / f"{n}.log") for n in names}
        monkeypatch.setattr(Config, "server", lambda config, log, timeout: self._process(config, log))
        monkeypatch.setattr(zos_run, "BenchClient", lambda url: nullcontext(self.servers[url]))

    def _process(self, config: Config, log: Path) -> Process:
        name = "separate" if config.mode is None else "live"
        return Process(name, self.events, self.failures, self.out / f"{name}.log")

    def go(self, *, separate: bool = True, side_by_side: bool = True, limit_s: float | None = None) -> None:
        session = zos_run.Session(
            config=Config(self.out, "stock"),
            plan=PLAN,
            attention="triton",
            shapes=((32, OUTPUT),),
            batches=(4,),
            separate=separate,
            side_by_side=side_by_side,
            start_timeout_s=1,
            say=lambda line: None,
        )
        zos_run.run(session, self.result, self.out, Budget(limit_s))


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_side_by_side_launches_the_separate_process_before_the_first_starts(both: Run) -> None:
    both.go()
    assert both.events[:2] == ["launch separate", "start live"]


def test_the_separate_process_idles_until_the_first_one_is_over(both: Run) -> None:
    both.go()
    assert both.events.index("stop live") < both.events.index("wave of separate")


def test_side_by_side_measures_both(both: Run) -> None:
    both.go()
    (point,) = both.result.data["points"]
    assert len(point["repeats"]) == len(point["separate"]["repeats"]) == PLAN.repeats


def test_without_it_the_separate_process_starts_when_the_first_one_is_over(both: Run) -> None:
    both.go(side_by_side=False)
    assert "launch separate" not in both.events
    assert both.events.index("stop live") < both.events.index("start separate")


def test_no_separate_process_is_launched_where_none_is_wanted(both: Run) -> None:
    both.go(separate=False)
    assert "launch separate" not in both.events
    assert "start separate" not in both.events


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ("launch separate", OSError("no room")),
        ("start live", ServerFailed("died")),
        ("wave of live", BenchError("400")),
        ("wave of live", SystemExit(2)),
        ("start separate", ServerFailed("died")),
        ("wave of separate", KeyboardInterrupt()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_separate_process_is_stopped_whatever_happens(
    both: Run, event: str, error: BaseException
) -> None:
    both.failures[event] = error
    with pytest.raises(type(error)):
        both.go()
    assert both.events[-1] == "stop separate"


def test_the_separate_process_is_stopped_when_the_time_is_over(both: Run) -> None:
    both.go(limit_s=0)
    assert "wave of live" not in both.events
    assert both.events[-1] == "stop separate"


def test_the_separate_process_is_stopped_when_its_point_has_no_room(both: Run) -> None:
    (both.out / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    both.go()
    assert both.events[-1] == "stop separate"


# ------------------------------------------------------------------ prompts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def english(tiny: Path) -> Plan:
    return Plan(("stock", "resident"), english=ModelInfo(tiny))


POINT = {"batch": 16, "prompt": 48}


def test_prompts_are_random_unless_english_is_asked_for() -> None:
    assert Plan(("stock", "resident"), vocab=300).prompts(POINT, 3) == prompts(16, 48, 300, 3)


@pytest.mark.parametrize("length", [16, 48, 1000])
def test_english_prompts_have_the_length_asked(english: Plan, length: int) -> None:
    found = english.prompts({"batch": 4, "prompt": length})
    assert [len(ids) for ids in found] == [length] * 4


def test_english_prompts_are_english(english: Plan, tiny: Path) -> None:
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(tiny / "tokenizer.json")).decode(english.prompts(POINT)[0])
    assert len(text) > 48
    assert story(0, sentences=48).startswith(text)


def test_the_english_requests_of_a_wave_differ_from_each_other(english: Plan) -> None:
    assert len({tuple(ids) for ids in english.prompts({"batch": 256, "prompt": 16}, 1)}) == 256


def test_no_two_waves_share_an_english_request(english: Plan) -> None:
    waves = [{tuple(ids) for ids in english.prompts(POINT, seed)} for seed in range(5)]
    assert len(set().union(*waves)) == 5 * 16


def test_both_processes_are_sent_the_same_english_requests(english: Plan, tiny: Path) -> None:
    again = Plan(("stock", "resident"), english=ModelInfo(tiny))
    assert english.prompts(POINT, 2) == again.prompts(POINT, 2)


def session_of(tiny: Path, *flags: str) -> zos_run.Session:
    return zos_cli._session(zos_cli.parser().parse_args(["--out", "x", "--model", str(tiny), *flags]))


def test_the_flag_takes_the_tokenizer_of_the_model_itself(tiny: Path) -> None:
    found = session_of(tiny, "--prompts", "english").plan.english
    assert found is not None
    assert found.path == tiny


def test_without_the_flag_prompts_are_random(tiny: Path) -> None:
    assert session_of(tiny).plan.english is None


def test_the_two_processes_run_one_after_the_other_without_the_flag(tiny: Path) -> None:
    assert not session_of(tiny).side_by_side
    assert session_of(tiny, "--side-by-side").side_by_side


def test_random_and_english_prompts_do_not_share_a_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nothing is measured.
    monkeypatch.setattr(zos_cli, "run", lambda session, result, out, budget: result.save())
    flags = ["--out", str(tmp_path), "--model", str(tiny)]
    zos_cli.main(flags)
    assert zos_cli.main([*flags, "--resume", "--prompts", "english"]) == 2
    assert 'prompts: "random" then, "english" now' in capsys.readouterr().err


# ------------------------------------------------------------------ a server of gpu_check.py


def command(name: str, out: Path, monkeypatch: pytest.MonkeyPatch, *, cuda: bool) -> list[str]:
    """The command line of one part's server; later flags win."""
    for module in (gpu, serve):
        monkeypatch.setattr(module, "cuda_available", lambda: cuda)
    return gpu.PARTS[name].config(out, REHEARSAL).server(out / "log").command


def flag(words: list[str], name: str) -> str | None:
    """The last value of a flag."""
    found = [value for word, value in pairwise(words) if word == name]
    return found[-1] if found else None


def test_the_fa3_canary_runs_in_the_lane_with_fa3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command("canary-lane-fa3", tmp_path, monkeypatch, cuda=True)
    assert flag(words, "--attention-backend") == "fa3"
    assert flag(words, "--zos-mode") == "resident"


def test_the_other_canary_in_the_lane_keeps_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command("canary-lane", tmp_path, monkeypatch, cuda=True)
    assert flag(words, "--attention-backend") == "triton"


def test_a_rehearsal_of_the_fa3_canary_asks_for_no_kernel_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command("canary-lane-fa3", tmp_path, monkeypatch, cuda=False)
    assert flag(words, "--attention-backend") is None
    assert words[0] == sys.executable
