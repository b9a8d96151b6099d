"""The checks on a CUDA device: parts, each one server, and what must hold of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench import canary, gpu_modes
from zos_sglang.testing.bench.check import Check
from zos_sglang.testing.bench.checkpoint import Shape, make_wide, vocabulary, write_config
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.measure import Settings, measure
from zos_sglang.testing.bench.serve import Config
from zos_sglang.testing.server import ServerProcess, cuda_available

COARSE = {"SGLANG_FORCE_COARSE_WAR_BARRIER": "1"}
SPIN = {"ZOS_WAIT": "spin"}
#: Requests the canary's server runs at once.
_CANARY_RUNNING = 64
_OVERLAPPING = ("overlap", "resident")


@dataclass(frozen=True)
class Scale:
    """Sizes of a run. The defaults are the device's; a rehearsal on the CPU uses smaller ones.

    `canary_pool` (tokens) is too small for the canary's requests, so that some are retracted.
    """

    shape: Shape = field(default_factory=Shape)
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 16, 64)
    repeats: int = 8
    output_tokens: int = 768
    #: The modes take turns within a wave: this machine's speed changes from second to second.
    turns: int = 6
    canary: canary.Load = field(default_factory=canary.Load)
    canary_pool: int = 12_000
    #: The small model of DeepSeek's shape, in float32.
    small: bool = False


@dataclass(frozen=True)
class Part:
    """One server and one examination of it. `seconds` is the estimate on an H200, without the start."""

    name: str
    what: str
    seconds: int
    config: Callable[[Path, Scale], Config]
    examine: Callable[[ServerProcess, Path, Scale], tuple[dict[str, Any], list[Check]]]


def _timing_part(attention: str, kind: str, env: dict[str, str], what: str) -> Part:
    name = attention if not kind else f"{attention}-{kind}"
    coarse = env is COARSE

    def config(models: Path, scale: Scale) -> Config:
        return Config(
            model=make_wide(models / "wide", scale.shape, dtype=scale.dtype),
            attention=attention if cuda_available() else None,
            dtype=scale.dtype,
            batches=scale.batches,
            tokens_a_request=scale.output_tokens + Settings.prompt_tokens,
            env=env,
        )

    def examine(server: ServerProcess, models: Path, scale: Scale) -> tuple[dict[str, Any], list[Check]]:
        settings = Settings(
            modes=("stock", "overlap"),
            compared=("sync",),
            batches=scale.batches,
            repeats=scale.repeats,
            output_tokens=scale.output_tokens,
            turns=scale.turns,
            vocab=vocabulary(models / "wide"),
        )
        with BenchClient(server.url) as client:
            result = measure(client, settings, name)
        return result, judge_timing(result, coarse=coarse)

    return Part(name, what, 70, config, examine)


def judge_timing(result: dict[str, Any], *, coarse: bool) -> list[Check]:
    """What must hold of a timed part: answers, barrier, streams, step time, no fallback."""
    checks = []
    for batch, entry in result["digests"].items():
        verdict = entry["verdict"]
        checks.append(Check(f"batch {batch}: answers of all modes equal", verdict == "equal", verdict))
        varied = (entry["different_answers"], entry["different_tokens_an_answer"])
        checks.append(
            Check(
                f"batch {batch}: the answers differ from each other",
                varied[0] == entry["answers"] and varied[1] > 8,
                f"{varied[0]} of {entry['answers']}, {varied[1]} different tokens an answer",
            )
        )
    for entry in result["ratios"]:
        ratio = entry["wall"]["median"]
        what = f"batch {entry['batch']}: step of {entry['mode']} at most 1.00 times stock's"
        checks.append(Check(what, round(ratio, 2) <= 1.0, ratio))
    paths = result["zos"]["paths"]
    fired = {name: paths[name] for name in ("barrier-fine", "barrier-coarse", "barrier-off")}
    kind = "coarse" if coarse else "fine"
    only = fired["barrier-off"] == 0 and not (coarse and fired["barrier-fine"])
    checks.append(Check(f"the {kind} barrier fired", fired[f"barrier-{kind}"] > 0 and only, fired))
    checks.append(_streams(result["zos"]["streams"]))
    checks.append(Check("no launch fell back", paths["fallbacks"] == 0, paths["fallbacks"]))
    return checks


def _streams(handles: dict[str, Any]) -> Check:
    distinct = None not in handles.values() and len(set(handles.values())) == len(handles) == 3
    return Check("three distinct stream handles", distinct, handles)


def _canary_config(
    poison: bool = False, mode: str = "overlap", page_size: int = 1, attention: str = "triton"
) -> Callable[[Path, Scale], Config]:
    def config(models: Path, scale: Scale) -> Config:
        return Config(
            model=write_config(models / "canary", scale.shape, dtype=scale.dtype),
            mode=mode,
            dtype=scale.dtype,
            attention=attention if cuda_available() else None,
            batches=(1, 16, _CANARY_RUNNING),
            env={**canary.ENV, **(canary.POISON if poison else {})},
            args=[
                *canary.ARGS,
                *("--max-total-tokens", str(scale.canary_pool)),
                *("--max-running-requests", str(_CANARY_RUNNING)),
                *("--chunked-prefill-size", "512"),
                *("--schedule-conservativeness", "0.1"),
                *("--kv-canary-sweep-interval", "100"),
                *("--page-size", str(page_size)),
            ],
        )

    return config


def _examine_canary(server: ServerProcess, models: Path, scale: Scale) -> tuple[dict[str, Any], list[Check]]:
    load = replace(scale.canary, vocab=vocabulary(models / "canary"))
    result = canary.play(server, load)
    if result["broken"] is None:
        with BenchClient(server.url) as client:
            zos = client.zos()
        result["zos"] = {name: zos[name] for name in ("mode", "reasons", "paths", "streams", "lane")}
    return result, judge_canary(result, load.tokens)


def judge_canary(result: dict[str, Any], tokens: int) -> list[Check]:
    """What must hold after the canary's load: clean, alive, and everything it is there for happened."""
    checks = [
        Check("the server lived through it", result["broken"] is None, result["broken"]),
        Check("no violation", result["violations"] == 0, result["violations"]),
        Check("the canary was at work", result["protected_tokens"] > 0, result["protected_tokens"]),
        Check("every answer is the oracle's", not result["wrong"], result["wrong"][:3]),
        Check(f"at least {tokens} output tokens", result["output_tokens"] >= tokens, result["output_tokens"]),
        *(
            Check(f"{name} happened", result[key] > 0, result[key])
            for name, key in (
                ("aborts", "aborted"),
                ("prefix hits", "prefix_hits"),
                ("retractions", "retracted_requests"),
            )
        ),
    ]
    if zos := result.get("zos"):
        overlapped = zos["reasons"]["overlapped"]
        checks.append(
            Check("launches overlapped", zos["mode"] in _OVERLAPPING and overlapped > 0, overlapped)
        )
        if zos["mode"] == "resident":
            share = zos["lane"]["share"]
            checks.append(Check("decode steps ran in the lane", share > 0.5, zos["lane"]))
            checks.append(Check("no fault in the lane", zos["lane"]["faults"] == 0, zos["lane"]["faults"]))
        checks.append(Check("no launch fell back", zos["paths"]["fallbacks"] == 0, zos["paths"]["fallbacks"]))
    return checks


def _examine_poisoned(
    server: ServerProcess, models: Path, scale: Scale
) -> tuple[dict[str, Any], list[Check]]:
    load = replace(scale.canary, vocab=vocabulary(models / "canary"), limit_s=30)
    result = canary.play(server, load)
    return result, [
        Check("the canary reports swapped tokens", result["violations"] > 0, result["violations"]),
        Check("it ends the server", result["broken"] is not None, result["broken"]),
    ]


def _speculation(name: str, what: str, case: gpu_modes.Speculation) -> Part:
    return Part(
        name,
        what,
        40,
        lambda models, scale: case.config(models),
        lambda server, models, scale: case.examine(server),
    )


PARTS = {
    part.name: part
    for part in (
        _timing_part("triton", "", {}, "Triton attention, fine barrier: answers and step time"),
        _timing_part("triton", "spin", SPIN, "the same with ZOS_WAIT=spin"),
        _timing_part("triton", "coarse", COARSE, "the same with the coarse barrier"),
        _timing_part("fa3", "", {}, "FA3 attention, fine barrier: answers and step time"),
        _timing_part("fa3", "spin", SPIN, "the same with ZOS_WAIT=spin"),
        _timing_part("fa3", "coarse", COARSE, "the same with the coarse barrier"),
        Part("canary", "KV canary under a rough load", 60, _canary_config(), _examine_canary),
        Part("canary-lane", "the same in the lane", 60, _canary_config(mode="resident"), _examine_canary),
        Part(
            "canary-lane-64",
            "the same in the lane, page size 64",
            60,
            _canary_config(mode="resident", page_size=64),
            _examine_canary,
        ),
        Part(
            "canary-lane-fa3",
            "the same in the lane, FA3 attention",
            60,
            _canary_config(mode="resident", attention="fa3"),
            _examine_canary,
        ),
        _speculation(
            "speculation",
            "a draft model: a grammar advances inside verify; answers of all modes",
            gpu_modes.Speculation(waits=False, algorithm="STANDALONE", on_cpu="NGRAM_BARRIER"),
        ),
        _speculation(
            "speculation-ngram",
            "drafts from the host: launches wait for a grammar; answers of all modes",
            gpu_modes.Speculation(waits=True, algorithm="NGRAM", on_cpu="NGRAM"),
        ),
        Part(
            "moe-mla",
            "DeepSeek's shape: latent attention and experts; answers of all modes",
            40,
            lambda models, scale: gpu_modes.latent_config(models, scale.dtype, scale.small),
            lambda server, models, scale: gpu_modes.examine_latent(server, models),
        ),
        Part("canary-bites", "KV canary with swapped tokens", 20, _canary_config(True), _examine_poisoned),
    )
}
