"""POST /set_internal_state, from the body's bytes to the scheduler: a switch, or a refusal, never a fault.

The middleware is ours and so are the handlers; between them stand SGLang's decoding of the body and its
controller, both the real ones.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pydantic
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

from tests.fuzz import hostile
from tests.fuzz.hostile import Choices
from tests.fuzz.runner import Target
from zos_sglang.modes import MODE_CODES, MODES
from zos_sglang.observe.record import KEPT
from zos_sglang.settings import Settings
from zos_sglang.upstream import entry
from zos_sglang.upstream.http import PATH, ModeNames
from zos_sglang.upstream.record_handlers import record_handlers
from zos_sglang.upstream.runtime import Runtime

#: It logs every refusal.
logging.getLogger("sglang.srt.managers.scheduler_components.internal_state").setLevel(logging.ERROR)
SETTINGS = Settings.load({"ZOS_MODE": "resident", "ZOS_TRACE": "t.json"})
KEYS = ("zos_mode", "zos_consecutive_prefill", "zos_floor", *record_handlers(SimpleNamespace()))
#: What a request might hope to reach: other settings, names of Python, and names of ours.
_OTHERS = (
    "zos_trace",
    "trace",
    "ZOS_TRACE",
    "zos_settings",
    "__class__",
    "mode",
    "pp_max_micro_batch_size",
    "",
)
#: What FastAPI makes of the body.
_ADAPTER = pydantic.TypeAdapter(SetInternalStateReq)
_SCOPE = {
    "type": "http",
    "path": PATH,
    "method": "POST",
    "root_path": "",
    "headers": [(b"content-length", b"9"), (b"content-type", b"application/json")],
}


class Observed:
    """Stands for the observation: takes what the handlers may do, and nothing else."""

    __slots__ = ("can_measure_cost", "can_record", "reported")

    def __init__(self) -> None:
        self.can_record = self.can_measure_cost = True
        self.reported = 0

    def record(self, on: bool) -> None:
        assert on in (True, False)

    def detail(self, on: bool) -> None:
        assert on in (True, False)

    def reset(self) -> None:
        pass

    def measure_cost(self, steps: int) -> None:
        assert 1 <= steps <= 1_000_000


class Loop:
    """Stands for the event loop."""

    switch_requested = False


class Controller(SchedulerInternalStateController):
    """SGLang's, with our handlers; the scheduler behind it has one request slot."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(max_running_requests=1), False)

    def _update_handlers(self) -> dict[str, Any]:
        ours = entry.after_update_handlers({}, self)
        assert set(ours) == set(KEYS), "the keys of the live switch are a closed set"
        return ours


def _runtime() -> Runtime:
    """One in mode resident, with a lane in working order."""
    found = Runtime()
    found.settings = SETTINGS
    found.scheduler = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    found.mode, found.loop = "resident", Loop()  # type: ignore[assignment]
    found.observation = Observed()
    found._lane = SimpleNamespace(is_sound=True, floor_replays=0)
    return found


async def _backend(scope: Any, receive: Any, send: Any) -> None:
    """SGLang's address: decode, ask the controller, answer."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    assert dict(scope["headers"])[b"content-length"] in (b"9", str(len(body)).encode())
    try:
        request = _ADAPTER.validate_python(json.loads(body))
    except (ValueError, RecursionError):  # of JSON, of UTF-8, of pydantic
        await _answer(send, 422, b"{}")
        return
    answered = Controller().set_internal_state(request)
    await _answer(send, 200, json.dumps([answered.updated]).encode())


async def _answer(send: Any, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def make(choices: Choices) -> list[bytes]:
    """A body in the pieces in which it arrives."""
    document: Any = {"server_args": {}}
    for _ in range(choices.pick((1, 1, 0, 2, 3))):
        key = choices.pick(KEYS if choices.below(4) else _OTHERS)
        usual = (*MODES, *MODE_CODES.values(), 1, 0, KEPT, KEPT + 1, True, None)
        document["server_args"][key] = choices.pick(usual) if choices.below(3) else choices.value()
    how = choices.below(8)
    body = hostile.dumped(choices.replaced(document) if how == 1 else document)
    if how == 2:
        body = choices.cut(body)
    elif how == 3:
        depth = choices.pick([3, 400, 990, 1500, 20_000, 100_000])
        body = b'{"server_args":{"zos_mode":' + hostile.nested(depth) + b"}}"
    elif how == 4:
        wide = body.decode("utf-8", "replace").encode("utf-16")
        body = choices.pick([b"\xef\xbb\xbf" + body, body * 2, wide])
    if choices.below(2):
        return [body]
    at = choices.below(len(body) + 1)
    return [body[:at], body[at:]]


def check(pieces: list[bytes]) -> str:
    """Raises what came through the middleware; AssertionError for an answer or a change that is not ours."""
    runtime = _runtime()
    messages = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces) - 1}
        for number, piece in enumerate(pieces)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    with patch.object(entry, "runtime", runtime):
        _drive(ModeNames(_backend)(dict(_SCOPE), receive, send))
    rule = {"consecutive_prefill": SETTINGS.consecutive_prefill}
    assert runtime.settings.model_copy(update=rule) == SETTINGS, "a request changed another setting"
    assert runtime.pending in (None, *MODES)
    assert runtime.mode == "resident", "a switch waits for the step's end"
    assert isinstance(runtime.observation.reported, int) and 0 <= runtime.observation.reported <= KEPT
    assert 0 <= runtime._lane.floor_replays <= entry.MOST_REPLAYS
    switched = runtime.pending is not None
    status, body = sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])
    assert status in (200, 400, 422)
    assert not switched or (status, body) == (200, b"[true]"), "a refused request switched"
    if status == 400:
        message = json.loads(body)["error"]["message"]
        assert "mode" in message or "zos_consecutive_prefill" in message
        assert len(message) < 700
    return "switched" if switched else {200: body.decode(), 400: "400", 422: "422"}[status]


def _drive(coroutine: Any) -> None:
    """Run a coroutine in which nothing ever waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


TARGET = Target("control", "POST /set_internal_state", make, check)
