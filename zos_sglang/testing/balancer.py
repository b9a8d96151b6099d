"""The smallest router for one prefill and one decode server: every request goes to both, decode answers.

What a router has to do for prefill/decode disaggregation: give each request a room number and the prefill
server's bootstrap address, send it to both servers, and stream the decode server's answer. For tests; use
sglang-router for anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from zos_sglang.testing.server import HOST, KEEP_ALIVE_S

#: These go to both servers as they are.
CONTROL = ("abort_request", "flush_cache", "set_internal_state", "pause_generation", "continue_generation")


def with_room(body: dict[str, Any], bootstrap_port: int) -> dict[str, Any]:
    """The request for both servers. A request with several prompts gets one room for each."""
    prompts = body.get("text", body.get("input_ids"))
    several = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    count = len(prompts) if several else 1  # type: ignore[arg-type]
    rooms = [random.getrandbits(62) for _ in range(count)]
    return {
        **body,
        "bootstrap_host": ["127.0.0.1"] * count if several else "127.0.0.1",
        "bootstrap_port": [bootstrap_port] * count if several else bootstrap_port,
        "bootstrap_room": rooms if several else rooms[0],
    }


class Balancer:
    """Forwards to one prefill and one decode server."""

    def __init__(self, prefill: str, decode: str, bootstrap_port: int) -> None:
        self.prefill, self.decode, self.bootstrap_port = prefill, decode, bootstrap_port
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(600), trust_env=False, limits=httpx.Limits(max_connections=None)
        )

    async def health(self, request: Request) -> Response:
        answers = await asyncio.gather(
            *(self.client.get(f"{url}/health") for url in (self.prefill, self.decode))
        )
        return Response(status_code=max(answer.status_code for answer in answers))

    async def info(self, request: Request) -> Response:
        """What the decode server says of itself: the one that generates."""
        answer = await self.client.get(self.decode + request.url.path)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def control(self, request: Request) -> Response:
        body = await request.body()
        answers = await asyncio.gather(
            *(
                self.client.post(url + request.url.path, content=body, headers=_JSON)
                for url in (self.prefill, self.decode)
            )
        )
        return Response(answers[-1].content, max(answer.status_code for answer in answers))

    async def generate(self, request: Request) -> Response:
        body = json.dumps(with_room(await request.json(), self.bootstrap_port))
        first = asyncio.create_task(self._prefill(request.url.path, body))
        send = self.client.build_request("POST", self.decode + request.url.path, content=body, headers=_JSON)
        try:
            answer = await self.client.send(send, stream=True)
        except httpx.HTTPError as error:
            first.cancel()
            return Response(f"the decode server did not answer: {error!r}", 502)
        return StreamingResponse(
            self._relay(answer, first), answer.status_code, media_type=answer.headers.get("content-type")
        )

    async def _prefill(self, path: str, body: str) -> None:
        # Its answer is of no interest: what failed there fails the transfer, and decode says so.
        with contextlib.suppress(httpx.HTTPError):
            await self.client.post(self.prefill + path, content=body, headers=_JSON)

    async def _relay(self, answer: httpx.Response, first: asyncio.Task[None]) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            # The client went away: closing both connections aborts the request in both servers.
            first.cancel()
            await answer.aclose()


_JSON = {"content-type": "application/json"}


def application(balancer: Balancer) -> Starlette:
    return Starlette(
        routes=[
            *(Route(f"/{name}", balancer.control, methods=["GET", "POST"]) for name in CONTROL),
            *(Route(path, balancer.health) for path in ("/health", "/health_generate")),
            *(Route(path, balancer.info) for path in ("/server_info", "/get_model_info", "/model_info")),
            Route("/{path:path}", balancer.generate, methods=["POST"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    parser.add_argument("--bootstrap-port", type=int, required=True, help="of the prefill server")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    balancer = Balancer(given.prefill, given.decode, given.bootstrap_port)
    served = application(balancer)
    uvicorn.run(served, host=HOST, port=given.port, timeout_keep_alive=KEEP_ALIVE_S, log_level="warning")


if __name__ == "__main__":
    main()
