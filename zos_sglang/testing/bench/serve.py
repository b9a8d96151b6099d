"""The server under the benchmark: flags and environment for the CPU and for a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zos_sglang.testing.bench.checkpoint import Shape, make_wide
from zos_sglang.testing.models import make_tiny
from zos_sglang.testing.server import ServerProcess, cuda_available

TINY, WIDE = "tiny", "qwen3-0.6b-shape"
#: Random models made on the spot, by name.
SHAPES = {WIDE: Shape(), "qwen3-1.7b-shape": Shape(hidden=2048, inner=6144)}


@dataclass(frozen=True)
class Config:
    """One server. Where a field is None, the machine decides: CUDA, or the plain-CPU platform.

    `mode` None is stock SGLang without the plugin. `batches` are the decode batch sizes that get a CUDA
    graph.
    """

    model: Path
    mode: str | None = "overlap"
    attention: str | None = None
    dtype: str | None = None
    graphs: bool = True
    prefill_graphs: bool = False
    batches: Sequence[int] = (1, 16, 64)
    tokens_a_request: int = 512
    env: Mapping[str, str] = field(default_factory=dict)
    args: Sequence[str] = ()
    #: A grammar needs one; everything else is asked with token ids.
    tokenizer: bool = False

    def command_args(self, cuda: bool) -> list[str]:
        """SGLang's flags; later ones win, so `args` can change any of them."""
        pool = max(32768, 2 * max(self.batches) * self.tokens_a_request)
        found = [] if self.tokenizer else ["--skip-tokenizer-init"]
        found += ["--max-total-tokens", str(pool)]
        found += ["--max-running-requests", str(max(128, *self.batches))]
        if attention := self.attention or ("triton" if cuda else None):
            found += ["--attention-backend", attention]
        if dtype := self.dtype or ("bfloat16" if cuda else None):
            found += ["--dtype", dtype]
        if cuda:
            found += ["--skip-server-warmup"]
            if not self.prefill_graphs:
                found += ["--disable-prefill-cuda-graph"]
            found += (
                ["--cuda-graph-bs-decode", *map(str, self.batches)]
                if self.graphs
                else ["--disable-decode-cuda-graph"]
            )
        return [*found, *self.args]

    def environment(self, cuda: bool) -> dict[str, str]:
        """On the CPU one thread of torch, for spinning ones disturb."""
        quiet = {} if cuda else {"OMP_NUM_THREADS": "1"}
        return {**quiet, **self.env}

    def server(self, log: Path, start_timeout_s: float = 300) -> ServerProcess:
        """The server, not started yet."""
        cuda = cuda_available()
        return ServerProcess(
            self.model,
            mode=self.mode,
            args=self.command_args(cuda),
            env=self.environment(cuda),
            log=log,
            start_timeout_s=start_timeout_s,
            cpu=not cuda,
        )


def find_model(name: str, cache: Path) -> Path:
    """The folder of `tiny` or one of `SHAPES` (made under `cache` if need be), or the path `name`.

    Raises FileNotFoundError if it is a path without a model.
    """
    if name == TINY:
        return make_tiny("qwen3", cache / "tiny-qwen3")
    if name in SHAPES:
        return make_wide(cache / name, SHAPES[name])
    folder = Path(name)
    if not (folder / "config.json").is_file():
        known = ", ".join((TINY, *SHAPES))
        raise FileNotFoundError(f"--model {name}: neither {known} nor a folder with a config.json")
    return folder
