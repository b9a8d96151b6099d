"""Flags that the measuring commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from zos_sglang.testing.bench.flags import json_flag, model_flags, modes_of, server_flags, server_options
from zos_sglang.testing.bench.serve import Config


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for add in (model_flags, server_flags, json_flag):
        add(parser)
    return parser.parse_args(words)


def test_what_a_server_is_started_with_follows_from_the_flags() -> None:
    args = parsed("--graphs", "off", "--env", "A=b=c", "--server-args", "--tp 2", "--dtype", "float16")
    config = Config(Path("model"), **server_options(args, ["--first"]))
    assert (config.graphs, config.dtype, config.env) == (False, "float16", {"A": "b=c"})
    assert config.args == ["--first", "--tp", "2"]


@pytest.mark.parametrize("asked", [False, True])
def test_prefills_have_cuda_graphs_only_where_asked_for(asked: bool) -> None:
    config = Config(Path("model"), **server_options(parsed(*["--prefill-graphs"] * asked)))
    assert ("--disable-prefill-cuda-graph" in config.command_args(cuda=True)) is not asked


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("A", "--env 'A': write NAME=VALUE"),
        ("ZOS_MODES=1", "Did you mean ZOS_MODE"),
        ("ZOS_WAIT=sleep", "Allowed: block, spin, poll"),
    ],
)
def test_a_variable_that_no_server_would_take_is_refused_before_one_starts(
    text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--env", text)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("least", "text", "message"),
    [
        (1, "sync,other", "'other' is not one of sync, stock"),
        (1, "sync,sync", "each mode once"),
        (2, "sync", "at least two different modes"),
        (2, "sync,sync", "at least two different modes"),
    ],
)
def test_modes_are_known_and_different(least: int, text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        modes_of(("sync", "stock"), least)(text)
    assert modes_of(("sync", "stock"), least)("stock,sync") == ("stock", "sync")
