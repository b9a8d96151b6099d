"""The users of a soak: each asks, cuts or waits, and hands every answer to the judge."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import httpx

from zos_sglang.testing.compare.records import Record
from zos_sglang.testing.compare.streams import NativeStream, data_of
from zos_sglang.testing.soak.judge import Life, Tally, faults_of, outcome_of
from zos_sglang.testing.soak.plan import Ask, Question, Source
from zos_sglang.testing.soak.truth import Truth

#: A user who was refused comes back after so long.
_REFUSED_S = 1.0


def client(url: str) -> httpx.AsyncClient:
    """A client of the server at `url`, with a connection for each request."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(180, connect=30),
        # The server closes an idle connection sometime; one reused at that moment looks like its death.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
        verify=False,  # plain HTTP: reading certificates takes longer than a request
    )


class Traffic:
    """Users that ask while the gate is open."""

    def __init__(
        self, http: httpx.AsyncClient, asked: Sequence[Question], truth: Truth, source: Source, tally: Tally
    ) -> None:
        self.http, self.asked, self.truth, self.source, self.tally = http, asked, truth, source, tally
        self.gate = asyncio.Event()
        self.under_way: dict[str, float] = {}
        #: Counts the times that everything was aborted at once.
        self.abort_alls = 0
        #: One of those is under way: it also meets those who ask now.
        self.aborting = False
        self.over = False

    async def user(self) -> None:
        """One user, until the soak is over. A server that is gone ends all of them."""
        while not self.over:
            await self.gate.wait()
            await asyncio.sleep(self.source.pause_s())
            if self.over or not self.gate.is_set():
                continue
            try:
                await self._ask(self.source.draw())
            except httpx.HTTPError as error:
                self.tally.broken = self.tally.broken or f"{type(error).__name__}: {error}"
                self.over = True
                self.gate.set()

    async def drained(self, limit_s: float) -> bool:
        """Close the gate and wait for the requests under way; False if some are left after `limit_s`."""
        self.gate.clear()
        end = time.monotonic() + limit_s
        while self.under_way and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return not self.under_way

    @property
    def oldest_s(self) -> float:
        """Age of the oldest request under way."""
        return time.monotonic() - min(self.under_way.values(), default=time.monotonic())

    # ------------------------------------------------------------------ one request

    async def _ask(self, ask: Ask) -> None:
        begun, before, aborting = time.monotonic(), self.abort_alls, self.aborting
        self.tally.requests += 1
        self.under_way[ask.rid] = begun
        try:
            whole = self._hang_up(ask) if ask.cut == "hang up" else self._whole(ask, self.http)
            answers = await whole
        finally:
            del self.under_way[ask.rid]
        seconds = time.monotonic() - begun
        self.tally.longest_s = max(self.tally.longest_s, seconds)
        life = Life(seconds, aborting or self.abort_alls != before)
        for answer in answers:
            self._judge(ask, answer, life)
        self.tally.outcomes["hung up"] += not answers
        if any(answer.status == 503 for answer in answers):
            await asyncio.sleep(_REFUSED_S)

    def _judge(self, ask: Ask, answer: Record, life: Life) -> None:
        tally = self.tally
        outcome, fault = outcome_of(ask, answer, life, self.source.scale.timeout_s)
        tally.outcomes[outcome] += 1
        if fault is not None:
            tally.fault(f"{ask.rid} (cut {ask.cut}): {fault}")
        # Copies of one question have ids of their own: the oracle cannot tell their answers.
        wanted = self.truth.expected(ask)
        for sentence in faults_of(ask, answer, wanted, len(self.asked[ask.question].ids), outcome):
            tally.fault(sentence)
        tally.output_tokens += len(answer.token_ids or [])
        tally.retractions += answer.retractions

    async def _whole(self, ask: Ask, http: httpx.AsyncClient) -> list[Record]:
        abort = asyncio.create_task(self._abort(ask)) if ask.cut == "abort" else None
        try:
            if ask.stream and ask.copies == 1:
                return [await self._streamed(ask, http)]
            return await self._at_once(ask, http)
        finally:
            if abort is not None:
                await abort

    async def _abort(self, ask: Ask) -> None:
        await asyncio.sleep(ask.after_s)
        await self.http.post("/abort_request", json={"rid": ask.rid})

    async def _hang_up(self, ask: Ask) -> list[Record]:
        """Leave in the middle; nothing, or the answer that came before that.

        By a client that is closed afterwards. One that left between its connection and its request would keep
        that connection otherwise (encode/httpcore issue 1093), and so does the server.
        """
        async with client(str(self.http.base_url)) as leaving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ask.after_s + 0.02):
                    return await self._whole(ask, leaving)
        return []

    def _body(self, ask: Ask) -> dict[str, Any]:
        question = self.asked[ask.question]
        params = {"temperature": 0, "max_new_tokens": ask.tokens, **question.params}
        if ask.copies > 1:
            params["n"] = ask.copies
        return {
            "rid": ask.rid,
            "input_ids": list(question.ids),
            "sampling_params": params,
            "priority": ask.priority,
            "stream": ask.stream and ask.copies == 1,
        }

    async def _streamed(self, ask: Ask, http: httpx.AsyncClient) -> Record:
        record = Record(name=ask.rid)
        reader = NativeStream(record)
        async with http.stream("POST", "/generate", json=self._body(ask)) as response:
            record.status = response.status_code
            if response.status_code != 200:
                record.error = (await response.aread()).decode()
                return record
            async for line in response.aiter_lines():
                if (payload := data_of(line)) is not None:
                    reader.feed(payload)
        reader.finish()
        if reader.final:
            _keep(record, reader.final["meta_info"])
        return record

    async def _at_once(self, ask: Ask, http: httpx.AsyncClient) -> list[Record]:
        reply = await http.post("/generate", json=self._body(ask))
        if reply.status_code != 200:
            return [Record(name=ask.rid, status=reply.status_code, error=reply.text)]
        body = reply.json()
        answers = []
        for event in body if isinstance(body, list) else [body]:
            record = Record(name=ask.rid, status=200, token_ids=event["output_ids"])
            record.finish = event["meta_info"]["finish_reason"]
            _keep(record, event["meta_info"])
            answers.append(record)
        return answers


def _keep(record: Record, meta: dict[str, Any]) -> None:
    record.usage = {name: meta[name] for name in ("prompt_tokens", "completion_tokens") if name in meta}
    record.retractions = meta.get("num_retractions") or 0
