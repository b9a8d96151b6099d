"""A server's answer at `/server_info`, made of step records, and a little HTTP server that gives it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from tests.unit.made_records import records
from zos_sglang.observe.columns import to_columns
from zos_sglang.observe.model import what_if
from zos_sglang.observe.signs import judge
from zos_sglang.observe.summary import summarise
from zos_sglang.observe.totals import Totals
from zos_sglang.resident.account import LaneAccount


def steps_of(made: np.ndarray, **changes: Any) -> dict[str, Any]:
    """`zos.steps` of records."""
    totals = Totals()
    totals.add(made)
    found = {
        "format": 1,
        "asynchronous": True,
        "loop": "ours",
        "launches": int(made.size),
        "totals": totals.report(),
        "summary": summarise(made),
        "signs": [asdict(sign) for sign in judge(made)],
        "what_if": what_if(made),
        "last": to_columns(made[-64:]),
        "cost": None,
    }
    return json.loads(json.dumps(found | changes))


def info_of(
    made: np.ndarray | None = None,
    *,
    mode: str = "overlap",
    lane: LaneAccount | None = None,
    arguments: dict[str, Any] | None = None,
    zos: dict[str, Any] | None = None,
    **steps: Any,
) -> dict[str, Any]:
    """`/server_info` of a server that made these records; `steps` are changes to `zos.steps`."""
    block = {
        "mode": mode,
        "sglang": "0.5.23",
        "own_launch": True,
        "lane": (lane or LaneAccount()).report(),
        "steps": steps_of(records(0) if made is None else made, **steps),
    } | (zos or {})
    given = {"disable_overlap_schedule": False, "launch_command": "python -m x --model-path m"}
    return {**given, **(arguments or {}), "internal_states": [{"zos": block}]}


@contextlib.contextmanager
def served(answer: Any, status: int = 200, key: str | None = None) -> Iterator[str]:
    """A server that answers GET with `answer` (bytes, or what JSON can hold); its address."""
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            found = self.path == "/server_info"
            self.send_response(status if allowed and found else 404 if allowed else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
