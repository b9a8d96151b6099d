"""Names over HTTP: `POST /set_internal_state {"server_args": {"zos_mode": "stock"}}`, and the prefill rule's.

SGLang takes numbers only at that address and answers `[false]` with status 200 when the scheduler
refuses. This middleware turns the name of a mode or a rule into its number, and nonsense or a refusal
into HTTP 400 with a message. All other requests pass by untouched.
"""

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from zos_sglang.faults import plan
from zos_sglang.modes import MODE_CODES, RULE_CODES
from zos_sglang.settings import did_you_mean
from zos_sglang.upstream.releases import takes_app_path

logger = logging.getLogger(__name__)

PATH = "/set_internal_state"
_SHOWN = 80  # characters of a wrong value that an answer repeats
TARGET = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
APP_PATH_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
STOCK_APP = "sglang.srt.entrypoints.http_server:app"
WORKER_APP = "zos_sglang.upstream.http_worker:app"


class Word(NamedTuple):
    """A value that people write as a word: what it is called, and the number of each word."""

    noun: str
    codes: Mapping[str, int]


MODE_KEY, RULE_KEY = "zos_mode", "zos_consecutive_prefill"
WORDS = {
    MODE_KEY: Word("mode", {str(mode): code for mode, code in MODE_CODES.items()}),
    RULE_KEY: Word("rule", {str(rule): code for rule, code in RULE_CODES.items()}),
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class UnknownWord(ValueError):
    """No such mode, rule or fault, or a word in the wrong place; ``str()`` is the message for people."""


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
        except UnknownWord as error:
            await _refuse(str(error), scope, receive, send)
            return
        if new_body is not body:
            scope = {**scope, "headers": _with_length(scope["headers"], len(new_body))}
            messages = [{"type": "http.request", "body": new_body, "more_body": False}]
        if not wanted:
            await self.app(scope, _replay(messages, receive), send)
            return
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            answer.append(message)

        await self.app(scope, _replay(messages, receive), keep)
        if _is_refusal(answer):
            await _refuse(_why_refused(wanted), scope, receive, send)
            return
        for message in answer:
            await send(message)


def translate(body: bytes) -> tuple[dict[str, str], bytes]:
    """The words that a request body asks for by key ({}: none of ours), and the body with their numbers.

    A fault's words (`ZOS_FAULT`) get their number, too, but are no switch: they are not among the words
    returned. The body comes back as the same object unless something had to be replaced. Raises
    :class:`UnknownWord`.
    """
    try:
        request = json.loads(body)
        keys = request if isinstance(request, dict) else ()
        outside = next((key for key in keys if key.startswith("zos_")), None)
        values = {} if outside else request["server_args"]
        asked = {key: values[key] for key in (*WORDS, plan.KEY) if key in values}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}, body  # no switch of ours; what is wrong with it, SGLang says better
    if outside:
        raise UnknownWord(f'{outside[:_SHOWN]}: write {{"server_args": {{"{outside[:_SHOWN]}": ...}}}}')
    fault = asked.pop(plan.KEY, None)
    wanted = {key: _word(key, value) for key, value in asked.items()}
    if not any(isinstance(value, str) for value in (fault, *asked.values())):
        return wanted, body
    values |= {key: WORDS[key].codes[word] for key, word in wanted.items()}
    if isinstance(fault, str):
        values[plan.KEY] = _fault_code(fault)
    return wanted, json.dumps(request).encode()


def _fault_code(words: str) -> int:
    """The number of the one fault that `words` name, or of none. Raises UnknownWord."""
    try:
        faults = plan.parse(words)
        if len(faults) > 1:
            raise ValueError(f"{words!r}: one fault at a time")
    except ValueError as error:
        raise UnknownWord(f"{plan.KEY}: {error}") from None
    return plan.to_code(faults[0] if faults else None)


def _word(key: str, value: Any) -> str:
    """The word that `value` is, or whose number it is. Raises UnknownWord."""
    noun, codes = WORDS[key]
    if isinstance(value, str) and value in codes:
        return value
    for word, code in codes.items():
        if type(value) in (int, float) and value == code:
            return word
    shown = json.dumps(value)[:_SHOWN]
    near = did_you_mean(value[:_SHOWN].lower(), codes) if isinstance(value, str) else ""
    raise UnknownWord(f"{key}={shown}: there is no such {noun}. Allowed: {', '.join(codes)}.{near}")


def install(app: Starlette) -> None:
    """Add the middleware innermost, once; to be called before the app serves.

    Innermost: behind the API-key check, decompression, CORS and the request metrics, so those
    hold for our answers too. (`add_middleware` would put it outermost.)
    """
    if any(m.cls is ModeNames for m in app.user_middleware):
        return
    if app.middleware_stack is not None:
        raise RuntimeError("the HTTP app already serves; our middleware comes too late")
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


def _why_refused(wanted: Mapping[str, str]) -> str:
    """Only what was asked for is known here; the scheduler's own reason is in its log."""
    if MODE_KEY in wanted:
        what, kept = f"switch to mode {wanted[MODE_KEY]}", "mode"
    else:
        what, kept = f"take the consecutive-prefill rule {wanted[RULE_KEY]}", "rule"
    return (
        f"The scheduler refused to {what}; it keeps the {kept} it has. Either it is in mode "
        "off, which is final until a restart (use stock to alternate), or zos-sglang is not active in it "
        "(overlap is off, SGLang runs a loop that we leave alone, or this SGLang is not supported: its log "
        "says which), or another value in the same request was refused. GET "
        "/server_info shows the mode; in mode off it has no entry zos."
    )


async def _refuse(message: str, scope: Message, receive: Receive, send: Send) -> None:
    response = JSONResponse({"error": {"message": message}}, status_code=400)
    await response(scope, receive, send)
