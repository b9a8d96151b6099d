"""The middleware that knows the names of modes and rules, on a small ASGI app, over httpx."""

import asyncio
import json
import os
from typing import Annotated

import httpx
import pytest
from fastapi import Body, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from zos_sglang.faults.plan import Fault, to_code
from zos_sglang.modes import MODE_CODES, RULE_CODES
from zos_sglang.upstream import http
from zos_sglang.upstream.http import ModeNames, install


class Backend:
    """A server that notes what reached it and answers as the scheduler would."""

    def __init__(self, answer=(True,), status=200):
        self.answer, self.status = answer, status
        self.bodies: list[bytes] = []
        self.headers: list[dict] = []
        methods = ["POST", "PUT", "GET"]
        paths = ("/set_internal_state", "/generate", "/deep/set_internal_state")
        self.app = Starlette(routes=[Route(p, self.handle, methods=methods) for p in paths])
        install(self.app)

    async def handle(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.headers.append(dict(request.headers))
        if isinstance(self.answer, bytes):
            return Response(self.answer, self.status)
        return JSONResponse(list(self.answer), self.status)

    def send(self, body, path="/set_internal_state", method="POST", **kwargs):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def go():
            transport = httpx.ASGITransport(self.app, **kwargs)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path, content=content)

        return asyncio.run(go())


def switch(mode):
    return {"server_args": {"zos_mode": mode}}


@pytest.mark.parametrize(("name", "code"), MODE_CODES.items())
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_modes_name_reaches_the_scheduler_as_its_number(name, code, method):
    backend = Backend()
    reply = backend.send(switch(name), method=method)
    assert (reply.status_code, reply.json()) == (200, [True])
    assert json.loads(backend.bodies[0]) == switch(code)
    assert int(backend.headers[0]["content-length"]) == len(backend.bodies[0])


def test_other_values_of_the_request_stay_beside_the_mode():
    backend = Backend()
    backend.send({"rid": "7", "server_args": {"pp_max_micro_batch_size": 8, "zos_mode": "sync"}})
    assert json.loads(backend.bodies[0]) == {
        "rid": "7",
        "server_args": {"pp_max_micro_batch_size": 8, "zos_mode": 1},
    }


@pytest.mark.parametrize(("name", "code"), RULE_CODES.items())
def test_a_prefill_rules_name_reaches_the_scheduler_as_its_number(name, code):
    backend = Backend()
    reply = backend.send({"server_args": {"zos_mode": 3, "zos_consecutive_prefill": name}})
    assert (reply.status_code, reply.json()) == (200, [True])
    assert json.loads(backend.bodies[0]) == {"server_args": {"zos_mode": 3, "zos_consecutive_prefill": code}}


@pytest.mark.parametrize("rule", ["firsttoken", "", "ALWAYS", 3, -1, 0.5, True, None, ["never"]])
def test_what_is_no_prefill_rule_is_answered_with_400_and_switches_no_mode_either(rule):
    backend = Backend()
    reply = backend.send({"server_args": {"zos_mode": "stock", "zos_consecutive_prefill": rule}})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert f"zos_consecutive_prefill={json.dumps(rule)}: there is no such rule" in message
    assert "never, always, first-token" in message
    assert backend.bodies == []


def test_a_refused_rule_becomes_400_and_names_the_rule():
    reply = Backend((False,)).send({"server_args": {"zos_consecutive_prefill": "always"}})
    assert reply.status_code == 400
    assert "the consecutive-prefill rule always; it keeps the rule" in reply.json()["error"]["message"]


def test_a_fault_in_words_reaches_the_scheduler_as_its_number():
    backend = Backend()
    reply = backend.send({"rid": "7", "server_args": {"zos_fault": "advance:5+", "zos_mode": "stock"}})
    assert (reply.status_code, reply.json()) == (200, [True])
    code = to_code(Fault("advance", 5, always=True))
    assert json.loads(backend.bodies[0]) == {"rid": "7", "server_args": {"zos_fault": code, "zos_mode": 2}}
    backend.send({"server_args": {"zos_fault": "on"}})
    assert json.loads(backend.bodies[1]) == {"server_args": {"zos_fault": 0}}
    assert [int(h["content-length"]) for h in backend.headers] == [len(body) for body in backend.bodies]


@pytest.mark.parametrize("words", ["lauch", "launch:0", "launch:1,relay:2", ""])
def test_words_that_are_no_fault_are_answered_with_400_and_never_reach_the_scheduler(words):
    backend = Backend()
    reply = backend.send({"server_args": {"zos_fault": words}})
    assert reply.status_code == 400 and "zos_fault: " in reply.json()["error"]["message"]
    assert backend.bodies == []


@pytest.mark.parametrize("mode", ["overlpa", "", "OVERLAP", 7, -1, 2.5, True, None, ["stock"]])
def test_nonsense_is_answered_with_400_and_never_reaches_the_scheduler(mode):
    backend = Backend()
    reply = backend.send(switch(mode))
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert f"zos_mode={json.dumps(mode)}" in message
    assert "off, sync, stock, overlap" in message
    assert backend.bodies == []


def test_an_unknown_mode_is_answered_with_the_nearest_name():
    message = Backend().send(switch("overlpa")).json()["error"]["message"]
    assert "Did you mean overlap?" in message


@pytest.mark.parametrize("mode", ["stock", 2])
@pytest.mark.parametrize("answer", [(False,), (True, False)])
def test_a_refused_switch_becomes_400_and_says_why_it_may_be(mode, answer):
    reply = Backend(answer).send(switch(mode))
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert "mode stock" in message
    assert "mode off, which is final until a restart" in message
    assert "not active" in message


def test_a_refusal_of_another_setting_stays_as_the_scheduler_gave_it():
    reply = Backend((False,)).send({"server_args": {"pp_max_micro_batch_size": 8}})
    assert (reply.status_code, reply.json()) == (200, [False])


@pytest.mark.parametrize(
    "body",
    [
        b'{ "server_args" : {"pp_max_micro_batch_size":8} }',
        b'{"server_args": {"zos_mode":  3}}',
        b'{"server_args": {"zos_consecutive_prefill":  1}}',
        b'{"server_args": ["zos_mode"]}',
        b"[1]",
        b"",
        b"not json",
        b'\xff\xfe{"zos_mode"',
    ],
)
def test_bodies_without_a_name_to_replace_pass_byte_for_byte(body):
    backend = Backend()
    assert backend.send(body).status_code == 200
    assert backend.bodies == [body]


def test_a_word_outside_server_args_is_sent_back_with_the_right_body():
    backend = Backend()
    reply = backend.send(b'{"zos_mode": "stock"}')
    assert reply.status_code == 400 and not backend.bodies
    assert reply.json()["error"]["message"] == 'zos_mode: write {"server_args": {"zos_mode": ...}}'


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("GET", "/set_internal_state"),
        ("POST", "/deep/set_internal_state"),
    ],
)
def test_other_requests_are_untouched(method, path):
    backend = Backend((False,))
    body = json.dumps(switch("nonsense")).encode()
    reply = backend.send(body, path=path, method=method)
    assert (reply.status_code, reply.json()) == (200, [False])
    assert backend.bodies == [body]


def test_an_error_status_of_the_server_is_passed_on():
    reply = Backend(b"busy", status=503).send(switch("stock"))
    assert (reply.status_code, reply.content) == (503, b"busy")


def test_an_answer_that_is_no_json_is_passed_on():
    reply = Backend(b"fine").send(switch("stock"))
    assert (reply.status_code, reply.content) == (200, b"fine")


def test_a_server_below_a_root_path_is_covered_too():
    backend = Backend()
    reply = backend.send(switch("x"), path="/api/set_internal_state", root_path="/api")
    assert reply.status_code == 400
    assert "zos_mode" in reply.json()["error"]["message"]


def test_a_body_in_pieces_is_read_whole():
    seen = []

    async def inner(scope, receive, send):
        seen.append(await receive())
        seen.append(await receive())
        await JSONResponse([True])(scope, receive, send)

    body = json.dumps(switch("stock")).encode()
    pieces = iter(
        [
            {"type": "http.request", "body": body[:9], "more_body": True},
            {"type": "http.request", "body": body[9:], "more_body": False},
            {"type": "http.disconnect"},
        ]
    )
    sent = []

    async def receive():
        return next(pieces)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/set_internal_state",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(ModeNames(inner)(scope, receive, send))
    assert json.loads(seen[0]["body"]) == switch(2)
    assert seen[1] == {"type": "http.disconnect"}
    assert sent[0]["status"] == 200


def test_the_lifespan_of_the_app_is_untouched():
    seen = []

    async def inner(scope, receive, send):
        seen.append((scope, receive, send))

    parts = ({"type": "lifespan"}, object(), object())
    asyncio.run(ModeNames(inner)(*parts))
    assert seen == [parts]


def test_installing_twice_adds_it_once():
    app = Starlette()
    install(app)
    install(app)
    assert [m.cls for m in app.user_middleware] == [ModeNames]


def test_it_is_innermost_so_that_other_middleware_sees_our_400():
    app = FastAPI()
    seen = []

    @app.middleware("http")
    async def outer(request, call_next):
        response = await call_next(request)
        seen.append(response.status_code)
        return response

    install(app)
    backend = Backend()
    backend.app = app
    assert backend.send(switch("x")).status_code == 400
    assert seen == [400]


def test_installing_into_a_serving_app_is_an_error():
    backend = Backend()
    app = backend.app = Starlette()
    backend.send(b"")
    with pytest.raises(RuntimeError, match="too late"):
        install(app)


def test_fastapi_validates_the_translated_body():
    app = FastAPI()

    @app.post("/set_internal_state")
    async def state(server_args: Annotated[dict[str, int | float], Body(embed=True)]):
        return [server_args["zos_mode"] == 3]

    install(app)
    backend = Backend()
    backend.app = app
    transport = httpx.ASGITransport(app)

    async def go():
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/set_internal_state", json=switch("overlap"))

    reply = asyncio.run(go())
    assert (reply.status_code, reply.json()) == (200, [True])


def test_the_hook_target_and_the_worker_path_exist_in_sglang(monkeypatch):
    """Also the hook itself, on SGLang's real app."""
    import inspect
    import pkgutil

    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.environ import envs

    assert inspect.isfunction(pkgutil.resolve_name(http.TARGET))
    monkeypatch.delenv(http.APP_PATH_VARIABLE, raising=False)
    assert envs.SGLANG_HTTP_SERVER_APP_PATH.get() == http.STOCK_APP
    monkeypatch.setattr(app, "user_middleware", list(app.user_middleware))
    http.before_http_server()
    assert app.user_middleware[-1].cls is ModeNames
    assert os.environ.pop(http.APP_PATH_VARIABLE) == http.WORKER_APP
    assert pkgutil.resolve_name(http.WORKER_APP) is app


def test_an_app_path_of_the_users_own_is_kept_with_a_warning(monkeypatch, caplog):
    from sglang.srt.entrypoints.http_server import app

    monkeypatch.setattr(app, "user_middleware", [])
    monkeypatch.setenv(http.APP_PATH_VARIABLE, "mine:app")
    http.before_http_server()
    assert os.environ[http.APP_PATH_VARIABLE] == "mine:app"
    assert "mine:app" in caplog.text


def test_nesting_too_deep_for_the_parser_is_left_to_the_server():
    backend = Backend()
    body = b"[" * 100_000
    assert backend.send(body).status_code == 200
    assert backend.bodies == [body]


def test_a_huge_wrong_mode_is_not_repeated_whole():
    message = Backend().send(switch("x" * 1_000_000)).json()["error"]["message"]
    assert len(message) < 300 and "there is no such mode" in message


def test_a_body_that_breaks_off_switches_nothing():
    reached = []

    async def app(scope, receive, send):
        reached.extend([await receive(), await receive()])

    parts = [
        {"type": "http.request", "body": json.dumps(switch("off")).encode(), "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return parts.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/set_internal_state", "headers": []}
    asyncio.run(ModeNames(app)(scope, receive, None))
    assert [message["type"] for message in reached] == ["http.request", "http.disconnect"]
    assert json.loads(reached[0]["body"]) == switch("off")
