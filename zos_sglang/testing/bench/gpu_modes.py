"""Checks on a CUDA device that compare the answers of the modes: speculation, latent attention and experts.

Each part is one server whose modes are switched while it runs, so all of them see the same weights, pools
and graphs. The counters of `/server_info` then say what the loop did.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.check import Check
from zos_sglang.testing.bench.checkpoint import make_wide, vocabulary
from zos_sglang.testing.bench.checkpoint_latent import LatentShape
from zos_sglang.testing.bench.client import BenchClient, prompts
from zos_sglang.testing.bench.serve import Config
from zos_sglang.testing.models import make_tiny
from zos_sglang.testing.server import ServerProcess, cuda_available

MODES = ("stock", "overlap", "resident")
REGEX = "[a-f]{4,10}(-[0-9]{2,6}){2,8}"
ROWS, PROMPT, OUTPUT = 16, 24, 48
#: Small enough for the plain CPU; what a rehearsal runs.
SMALL = LatentShape(
    layers=2,
    hidden=64,
    heads=4,
    q_rank=48,
    kv_rank=32,
    nope_dim=32,
    rope_dim=16,
    value_dim=32,
    inner=128,
    experts=8,
    experts_a_token=2,
    expert_inner=32,
    vocab=512,
    context=4096,
)


@dataclass(frozen=True)
class Speculation:
    """One algorithm. `waits`: whether a grammar holds its launches back."""

    waits: bool
    algorithm: str
    on_cpu: str

    def config(self, models: Path) -> Config:
        """A tiny model with a tokenizer, which a grammar needs; a draft model is the same one."""
        model = make_tiny("qwen3", models / "tiny-qwen3")
        name = self.algorithm if cuda_available() else self.on_cpu
        # SGLang's CUDA kernels of the norms know half precision only.
        dtype = "bfloat16" if cuda_available() else "float32"
        args = ["--speculative-algorithm", name, "--speculative-num-draft-tokens", "4"]
        if name == "STANDALONE":
            args += ["--speculative-draft-model-path", str(model)]
            args += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
        return Config(
            model=model, dtype=dtype, batches=(1, ROWS), args=args, tokenizer=True, attention=_attention()
        )

    def examine(self, server: ServerProcess) -> tuple[dict[str, Any], list[Check]]:
        """Plain and structured answers of every mode; launches held back for a grammar in mode `overlap`."""
        vocab = 300  # below the tiny model's added words
        with BenchClient(server.url) as client:
            found: dict[str, Any] = {"plain": {}, "structured": {}, "grammar_syncs": {}, "accepted": {}}
            for mode in MODES:
                client.switch(mode)
                found["plain"][mode], found["accepted"][mode] = ask(client, vocab, {"ignore_eos": True})
                before = client.zos()["reasons"]["grammar-sync"]
                found["structured"][mode], _ = ask(client, vocab, {"regex": REGEX})
                found["grammar_syncs"][mode] = client.zos()["reasons"]["grammar-sync"] - before
            found["zos"] = kept(client.zos())
        return found, judge_speculation(found, self.waits)


def ask(client: BenchClient, vocab: int, params: dict[str, Any]) -> tuple[list[list[int]], float | None]:
    """Greedy answers to one batch, from an empty prefix cache, and tokens a verify step (None: none told)."""
    client.http.post("/flush_cache", params={"timeout": 10}).raise_for_status()
    body = {
        "input_ids": prompts(ROWS, PROMPT, vocab),
        "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT, **params},
    }
    answers = client.post("/generate", body)
    verified = [answer["meta_info"].get("spec_verify_ct") for answer in answers]
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    rate = round(tokens / sum(verified), 3) if all(verified) else None
    return [list(answer["output_ids"]) for answer in answers], rate


def kept(zos: dict[str, Any]) -> dict[str, Any]:
    """What of our block belongs in the result file."""
    return {name: zos[name] for name in ("mode", "own_launch", "reasons", "paths", "streams", "lane")}


def judge_speculation(found: dict[str, Any], waits: bool) -> list[Check]:
    """What must hold of one algorithm's answers and counters."""
    checks = [*_same(found, "plain"), *_same(found, "structured"), _varied(found["plain"]["stock"])]
    syncs = found["grammar_syncs"]["overlap"]
    words = "launches waited for the grammar" if waits else "no launch waited for the grammar"
    checks.append(Check(words, (syncs > 0) is waits, syncs))
    rate = found["accepted"]["overlap"]
    checks.append(Check("steps verify drafts", rate is not None, rate))
    refused = found["zos"]["lane"]["refused"]
    checks.append(Check("the lane refuses speculation by name", refused == {"speculation": 1}, refused))
    return [*checks, *_at_work(found["zos"])]


def latent_config(models: Path, dtype: str, small: bool) -> Config:
    """A small model of DeepSeek's shape with random weights."""
    model = make_wide(models / "latent", SMALL if small else LatentShape(), dtype=dtype)
    return Config(model=model, dtype=dtype, batches=(1, ROWS), attention=_attention())


def examine_latent(server: ServerProcess, models: Path) -> tuple[dict[str, Any], list[Check]]:
    """Answers of every mode, what the lane says to such a model, and which barriers it took."""
    vocab = vocabulary(models / "latent")
    with BenchClient(server.url) as client:
        found: dict[str, Any] = {"plain": {}}
        for mode in MODES:
            client.switch(mode)
            found["plain"][mode], _ = ask(client, vocab, {"ignore_eos": True})
        found["zos"] = kept(client.zos())
    return found, judge_latent(found)


def judge_latent(found: dict[str, Any]) -> list[Check]:
    """What must hold of it. On a device with graphs the lane names why it refuses; without, it rides."""
    zos = found["zos"]
    lane, paths = zos["lane"], zos["paths"]
    named = {"kv-pool", "attention-backend"} & set(lane["refused"])
    barriers = {name: paths[name] for name in ("barrier-fine", "barrier-coarse", "barrier-off")}
    return [
        *_same(found, "plain"),
        _varied(found["plain"]["stock"]),
        Check("the lane rides or says why not", (lane["steps"] > 0) is not bool(named), lane["refused"]),
        Check("prefills take one kind of barrier, decode steps one", _by_phase(zos, barriers), barriers),
        *_at_work(zos),
    ]


def _by_phase(zos: dict[str, Any], barriers: dict[str, int]) -> bool:
    """Upstream records no read-done event for an eager prefill: its barrier is coarse, that of decode fine.

    Steps of the lane have none of their own.
    """
    used = sorted(count for count in barriers.values() if count)
    prefills, decodes = zos["paths"]["prefill"], zos["paths"]["decode"] - zos["lane"]["steps"]
    return used in ([prefills + decodes], sorted((prefills, decodes)))


def _same(found: dict[str, Any], kind: str) -> list[Check]:
    stock = found[kind]["stock"]
    return [
        Check(
            f"{kind} answers of mode {mode} are those of stock",
            found[kind][mode] == stock,
            sum(ours != theirs for ours, theirs in zip(found[kind][mode], stock, strict=True)),
        )
        for mode in MODES[1:]
    ]


def _varied(answers: list[list[int]]) -> Check:
    different = len({tuple(answer) for answer in answers})
    return Check("the answers differ from each other", different == len(answers), different)


def _at_work(zos: dict[str, Any]) -> list[Check]:
    overlapped, fallbacks = zos["reasons"]["overlapped"], zos["paths"]["fallbacks"]
    return [
        Check("launches are ours and overlap", zos["own_launch"] and overlapped > 0, overlapped),
        Check("no launch fell back", fallbacks == 0, fallbacks),
        Check("no fault in the lane", zos["lane"]["faults"] == 0, zos["lane"]["faults"]),
    ]


def _attention() -> str | None:
    return "triton" if cuda_available() else None
