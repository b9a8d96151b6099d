"""One server as a scenario sees it: generation on every endpoint, and the control calls.

A request that the server refuses is an answer like any other (status and message are compared).
A connection that breaks is not: it raises, because the server is gone.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from zos_sglang.testing.compare.records import Record, Records
from zos_sglang.testing.compare.streams import NativeStream, OpenAIStream, data_of

# Meta fields that tell of time, identity or luck (how the cache was cut), not of the answer.
VOLATILE = {
    "id",
    "e2e_latency",
    "response_sent_to_client_ts",
    "cached_tokens_details",
    "dp_rank",
}
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens")
LOGPROBS = re.compile(r"(input|output)_(token|top|token_ids)_(ids_)?logprobs(_length)?$")

OnEvent = Callable[[Record], Any]


class Client:
    """Plays requests against one server and files every answer under its name.

    `compare_cached` adds the count of cached prompt tokens to what is compared; only sound where
    requests come in waves.
    """

    def __init__(self, url: str, *, scenario: str = "", incremental: bool = False) -> None:
        self.http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(600.0, connect=60.0),
            # The server closes an idle connection after 5 s; reusing one at that very moment
            # fails, and would look like a dead server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self.scenario = f"{scenario}.{uuid.uuid4().hex[:6]}"
        self.incremental = incremental
        self.records: Records = {}
        self.compare_cached = False

    async def close(self) -> None:
        """Close all connections."""
        await self.http.aclose()

    def file(self, name: str, sent: dict[str, Any]) -> Record:
        """A new record, filed in the order of asking; two of one name are a scenario's bug."""
        if name in self.records:
            raise ValueError(f"scenario bug: two requests are called {name!r}")
        self.records[name] = record = Record(name=name, sent=sent)
        return record

    def rid(self, name: str) -> str:
        """Request id of the record `name`, readable in the server's log.

        Never used twice: two seconds after a stream has ended, SGLang aborts whatever bears its
        id by then.
        """
        return f"{self.scenario}.{name}"

    # ------------------------------------------------------------------ generation

    async def generate(
        self,
        name: str,
        prompt: str | list[int],
        params: Mapping[str, Any],
        *,
        stream: bool = False,
        on_event: OnEvent | None = None,
        **fields: Any,
    ) -> Record:
        """One native /generate request with one answer.

        `on_event` sees the record after every streamed event; if it returns True, the client
        hangs up. `fields` are further fields of the request.
        """
        key = "text" if isinstance(prompt, str) else "input_ids"
        body = {key: prompt, "sampling_params": dict(params), "stream": stream, **fields}
        record = self.file(name, body)
        body = {"rid": self.rid(name), **body}
        if not stream:
            response = await self.http.post("/generate", json=body)
            self._fill(record, response)
            return record
        reader = NativeStream(record, incremental=self.incremental)
        await self._stream("/generate", body, record, reader, on_event)
        if reader.final:
            self._keep_meta(record, reader.final["meta_info"])
        return record

    async def generate_many(
        self,
        name: str,
        prompts: list[Any],
        params: Mapping[str, Any] | list[dict[str, Any]],
        **fields: Any,
    ) -> list[Record]:
        """One native request with several answers (a list of prompts, or `n` > 1); not streamed.

        `params` may be a list, one for each prompt.
        """
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        prompt = prompts if len(prompts) > 1 else prompts[0]
        body = {key: prompt, "sampling_params": params, **fields}
        record = self.file(name, body)
        response = await self.http.post("/generate", json=body)
        if response.status_code != 200 or not isinstance(response.json(), list):
            self._fill(record, response)
            return [record]
        record.status = 200
        answers = [self.file(f"{name}[{i}]", {}) for i in range(len(response.json()))]
        for answer, event in zip(answers, response.json(), strict=True):
            answer.status = 200
            self._take(answer, event)
        return answers

    async def openai(
        self, name: str, kind: str, body: dict[str, Any], *, stream: bool = False
    ) -> list[Record]:
        """One /v1/completions or (kind "chat") /v1/chat/completions request; one record a choice."""
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        body = {"model": "default", "stream": stream, **body}
        if stream:
            body["stream_options"] = {"include_usage": True}
        first = self.file(name, body)

        def choice(index: int) -> Record:
            return first if index == 0 else self.file(f"{name}[{index}]", {})

        if stream:
            reader = OpenAIStream(choice, first)
            await self._stream(path, body, first, reader, None)
            first.usage = _usage(reader.usage)
            return list(reader.seen.values())
        response = await self.http.post(path, json=body)
        first.status = response.status_code
        if response.status_code != 200:
            first.error = response.text
            return [first]
        answer = response.json()
        for piece in answer["choices"]:
            record = choice(piece["index"])
            record.status = 200
            record.text = piece["message"]["content"] if kind == "chat" else piece["text"]
            record.finish = {"type": piece["finish_reason"], "matched": piece.get("matched_stop")}
            record.logprobs = piece.get("logprobs")
        first.usage = _usage(answer["usage"])
        return [r for n, r in self.records.items() if n == name or n.startswith(f"{name}[")]

    async def embed(self, name: str, prompt: str | list[str]) -> Record:
        """One /v1/embeddings request; the vectors are compared within the tolerance."""
        body = {"model": "default", "input": prompt}
        record = self.file(name, body)
        response = await self.http.post("/v1/embeddings", json=body)
        record.status = response.status_code
        if response.status_code != 200:
            record.error = response.text
            return record
        answer = response.json()
        record.vectors = [item["embedding"] for item in answer["data"]]
        record.usage = _usage(answer["usage"])
        return record

    async def read(self, name: str, path: str) -> Record:
        """GET `path`: the status and the names of the fields are compared, not the values."""
        record = self.file(name, {"GET": path})
        response = await self.http.get(path)
        record.status = response.status_code
        if response.headers.get("content-type", "").startswith("application/json"):
            record.fields = field_names(response.json())
        return record

    # ------------------------------------------------------------------ control

    async def control(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """POST to a control endpoint; the caller judges the status."""
        return await self.http.post(path, json=body)

    async def must(self, path: str, body: dict[str, Any] | None = None) -> None:
        """POST to a control endpoint that has to succeed here; files a record that says so."""
        count = sum(1 for name in self.records if name.startswith(path))
        record = self.file(f"{path}#{count + 1}", {"POST": path, **(body or {})})
        response = await self.control(path, body)
        record.status = response.status_code
        if response.status_code != 200:
            record.error = response.text
            record.faults.append(f"{path} answered {response.status_code}: {response.text[:300]}")

    async def flush(self, timeout_s: float = 60.0) -> str | None:
        """Empty the prefix cache once the server is idle. None, or why that never succeeded.

        Success says that no request is left anywhere, and that no page of the pool is missing
        (the scheduler's own idle check).
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            response = await self.http.post("/flush_cache")
            if response.status_code == 200:
                return None
            if asyncio.get_running_loop().time() > deadline:
                return f"not idle after {timeout_s:.0f} s: {response.text.strip()}"
            await asyncio.sleep(0.2)

    async def zos(self) -> dict[str, Any] | None:
        """Our server's account of its decisions, None on a stock server."""
        response = await self.http.get("/server_info")
        response.raise_for_status()
        state: dict[str, Any] | None = response.json()["internal_states"][0].get("zos")
        return state

    # ------------------------------------------------------------------ inner

    async def _stream(
        self,
        path: str,
        body: dict[str, Any],
        record: Record,
        reader: NativeStream | OpenAIStream,
        on_event: OnEvent | None,
    ) -> None:
        async with self.http.stream("POST", path, json=body) as response:
            record.status = response.status_code
            if response.status_code != 200:
                record.error = (await response.aread()).decode()
                return
            cut = False
            async for line in response.aiter_lines():
                payload = data_of(line)
                if payload is None:
                    continue
                reader.feed(payload)
                if on_event is not None and on_event(record):
                    cut = True
                    break
        reader.finish(cut=cut)

    def _fill(self, record: Record, response: httpx.Response) -> None:
        record.status = response.status_code
        if response.status_code != 200:
            record.error = response.text
            # An aborted request is answered with 4xx and its reason.
            return
        self._take(record, response.json())

    def _take(self, record: Record, event: dict[str, Any]) -> None:
        record.text = event["text"]
        record.token_ids = event["output_ids"]
        record.finish = event["meta_info"]["finish_reason"]
        self._keep_meta(record, event["meta_info"])

    def _keep_meta(self, record: Record, meta: dict[str, Any]) -> None:
        record.usage = _usage(meta)
        if self.compare_cached:
            record.usage["cached_tokens"] = meta["cached_tokens"]
        record.fields = sorted(set(meta) - VOLATILE)
        record.logprobs = {k: v for k, v in meta.items() if LOGPROBS.match(k)} or None
        record.vectors = meta.get("hidden_states")
        record.retractions = meta.get("num_retractions") or 0
        record.rank = 1 + max(r.rank for r in self.records.values())


def _usage(source: Mapping[str, Any] | None) -> dict[str, int]:
    return {key: source[key] for key in USAGE if key in (source or {})} if source else {}


def field_names(value: Any, prefix: str = "") -> list[str]:
    """Sorted dotted names of all fields of a JSON value; list items share the name `[]`."""
    if isinstance(value, dict):
        names = [n for k, v in value.items() for n in field_names(v, f"{prefix}.{k}")]
        return sorted({prefix, *names})
    if isinstance(value, list):
        return sorted({n for item in value for n in field_names(item, f"{prefix}[]")} | {prefix})
    return [prefix]
