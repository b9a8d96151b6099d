"""Our middleware stands behind SGLang's key check, whatever keys a server has."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, auth_level

from zos_sglang.upstream.http import PATH, install


def app_with(api_key: str | None, admin_api_key: str | None) -> FastAPI:
    """As `_setup_and_run_http_server` does it: our hook comes first, then the key check."""
    app = FastAPI()
    reached: list[Any] = []

    @app.api_route(PATH, methods=["POST", "PUT"])
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def control(body: dict[str, Any]) -> list[bool]:
        reached.append(body)
        return [True]

    install(app)
    if api_key or admin_api_key:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    app.state.reached = reached
    return app


def ask(app: FastAPI, key: str | None, mode: Any, path: str = PATH) -> int:
    async def go() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            reply = await client.post(path, json={"server_args": {"zos_mode": mode}}, headers=headers)
            return reply.status_code

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("api_key", "admin_api_key", "allowed"),
    [
        (None, None, {None, "user", "admin", "wrong"}),
        ("user", None, {"user"}),
        (None, "admin", {"admin"}),
        ("user", "admin", {"admin"}),
    ],
)
def test_the_key_that_upstream_wants_is_wanted(
    api_key: str | None, admin_api_key: str | None, allowed: set[str | None]
) -> None:
    app = app_with(api_key, admin_api_key)
    for key in (None, "user", "admin", "wrong"):
        assert ask(app, key, "stock") == (200 if key in allowed else 401)
        # Nonsense is judged by us only for those who may ask.
        assert ask(app, key, "nonsense") == (400 if key in allowed else 401)
    assert len(app.state.reached) == len(allowed)


@pytest.mark.parametrize("path", ["//set_internal_state", "/set_internal_state/", "/x/../set_internal_state"])
def test_no_spelling_of_the_address_goes_around_the_key(path: str) -> None:
    app = app_with("user", "admin")
    assert ask(app, None, "stock", path) in (401, 404, 307)
    assert app.state.reached == []
