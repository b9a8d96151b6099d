"""Mode names over HTTP: `POST /set_internal_state {"server_args": {"zos_mode": "stock"}}`.

SGLang takes numbers only at that address and answers `[false]` with status 200 when the scheduler
refuses. This middleware turns a mode's name into its number, and a nonsense mode or a refusal
into HTTP 400 with a message. All other requests pass by untouched.
"""

import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from zos_sglang.modes import MODE_CODES, MODES, mode_from_code
from zos_sglang.settings import did_you_mean
from zos_sglang.upstream.releases import takes_app_path

logger = logging.getLogger(__name__)

PATH = "/set_internal_state"
KEY = "zos_mode"
_SHOWN = 80  # characters of a wrong value that an answer repeats
TARGET = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
APP_PATH_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
STOCK_APP = "sglang.srt.entrypoints.http_server:app"
WORKER_APP = "zos_sglang.upstream.http_worker:app"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class UnknownMode(ValueError):
    """A `zos_mode` that names no mode; ``str()`` is the message for people."""


class ModeNames:
    """Raw ASGI middleware: see the module's text."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not _is_ours(scope):
            await self.app(scope, receive, send)
            return
        messages = await _read_body(receive)
        if messages[-1]["type"] != "http.request":  # the client went away in the middle of its body
            await self.app(scope, _replay(messages, receive), send)
            return
        body = b"".join(m.get("body", b"") for m in messages)
        try:
            wanted, new_body = translate(body)
        except UnknownMode as error:
            await _refuse(str(error), scope, receive, send)
            return
        if wanted is None:
            await self.app(scope, _replay(messages, receive), send)
            return
        if new_body is not body:
            scope = {**scope, "headers": _with_length(scope["headers"], len(new_body))}
            messages = [{"type": "http.request", "body": new_body, "more_body": False}]
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            answer.append(message)

        await self.app(scope, _replay(messages, receive), keep)
        if _is_refusal(answer):
            await _refuse(_why_refused(wanted), scope, receive, send)
            return
        for message in answer:
            await send(message)


def translate(body: bytes) -> tuple[str | None, bytes]:
    """The mode that a request body asks for (None: none), and the body with its number.

    The body comes back as the same object unless a name had to be replaced. Raises
    :class:`UnknownMode`.
    """
    try:
        request = json.loads(body)
        mode = request["server_args"][KEY]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, body  # no switch of ours; what is wrong with it, SGLang says better
    if isinstance(mode, str) and mode in MODE_CODES:
        request["server_args"][KEY] = MODE_CODES[mode]
        return mode, json.dumps(request).encode()
    name = mode_from_code(mode) if type(mode) in (int, float) else None
    if name is None:
        shown = json.dumps(mode)[:_SHOWN]
        near = did_you_mean(mode[:_SHOWN].lower(), MODES) if isinstance(mode, str) else ""
        raise UnknownMode(f"{KEY}={shown}: there is no such mode. Allowed: {', '.join(MODES)}.{near}")
    return name, body


def install(app: Starlette) -> None:
    """Add the middleware innermost, once; to be called before the app serves.

    Innermost: behind the API-key check, decompression, CORS and the request metrics, so those
    hold for our answers too. (`add_middleware` would put it outermost.)
    """
    if any(m.cls is ModeNames for m in app.user_middleware):
        return
    if app.middleware_stack is not None:
        raise RuntimeError("the HTTP app already serves; the zos_mode middleware comes too late")
    app.user_middleware.append(Middleware(ModeNames))


def before_http_server(server_args: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """BEFORE hook of :data:`TARGET`: the app is built, and nothing serves yet.

    Several tokenizer workers import the app by a path of their own, without plugins; they get
    the same app through :mod:`zos_sglang.upstream.http_worker`.
    """
    from sglang.srt.entrypoints.http_server import app

    install(app)
    if not takes_app_path():
        if getattr(server_args, "tokenizer_worker_num", 1) > 1:
            _warn_numbers_only("this SGLang")
        return
    path = os.environ.get(APP_PATH_VARIABLE) or STOCK_APP
    if path == STOCK_APP:
        os.environ[APP_PATH_VARIABLE] = WORKER_APP
    elif path != WORKER_APP:
        _warn_numbers_only(
            f"{APP_PATH_VARIABLE}={path}", " unless that app calls zos_sglang.upstream.http.install"
        )


def _warn_numbers_only(where: str, unless: str = "") -> None:
    logger.warning(
        "%s: with several tokenizer workers, %s takes only mode numbers (%s), no names%s.",
        where,
        PATH,
        MODE_CODES,
        unless,
    )


def _is_ours(scope: Message) -> bool:
    return (
        scope["type"] == "http"
        and scope["path"].endswith(PATH)
        and scope["method"] in ("POST", "PUT")
        and scope["path"].removeprefix(scope.get("root_path", "")) == PATH
    )


async def _read_body(receive: Receive) -> list[Message]:
    messages = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that hands out what was read already, then the connection's own messages."""
    waiting = iter(messages)

    async def again() -> Message:
        for message in waiting:
            return message
        return await receive()

    return again


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    return [
        (name, str(length).encode() if name.lower() == b"content-length" else value)
        for name, value in headers
    ]


def _is_refusal(answer: list[Message]) -> bool:
    """Whether the scheduler (any of its data-parallel ranks) answered false."""
    if not answer or answer[0].get("status") != 200:
        return False
    try:
        updated = json.loads(b"".join(m.get("body", b"") for m in answer[1:]))
    except ValueError:
        return False
    return isinstance(updated, list) and False in updated


def _why_refused(mode: str) -> str:
    return (
        f"The scheduler refused to switch to mode {mode}; it keeps the mode it has. Either it is in mode "
        "off, which is final until a restart (use stock to alternate), or zos-sglang is not active in it "
        "(overlap is off, SGLang runs a loop that we leave alone, or this SGLang is not supported: its log "
        "says which), or another value in the same request was refused. GET "
        "/server_info shows the mode; in mode off it has no entry zos."
    )


async def _refuse(message: str, scope: Message, receive: Receive, send: Send) -> None:
    response = JSONResponse({"error": {"message": message}}, status_code=400)
    await response(scope, receive, send)
