"""SGLang's runtime context of a plain CPU server, without a server."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from sglang.srt.runtime_context import SpawnRanks, create_context
from sglang.srt.server_args import ServerArgs


@cache
def plain_context() -> Any:
    """The configuration of a server with one rank and no options; upstream resolves it once."""
    environment = dict(os.environ)
    try:
        arguments = ServerArgs(model_path="dummy", device="cpu")
        return create_context(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    finally:
        # Resolving sets variables for the kernels' caches, which are none of the other tests' business.
        os.environ.clear()
        os.environ.update(environment)
