"""The clients: send requests when they are due, keep what comes back with its times, measure themselves.

aiohttp on uvloop, both dependencies of SGLang: httpx reads HTTP in Python, and 64 requests a second of 256
tokens are 16,000 events a second. Requests are dealt out to several processes for the same reason.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from zos_sglang.testing.bench.arrivals import Outcome, Request, distribution
from zos_sglang.testing.bench.arrivals_stream import StreamError, read_answer

#: How often each client looks how late its event loop is, in seconds.
_LAG_EVERY_S = 0.01
#: From handing out the requests to the first arrival: the clients' time to prepare.
_LEAD_S = 1.0
#: A client above this share of a core, or with this P99 of loop lag, may have delayed what it measured.
BUSY_SHARE, LAG_MS = 0.5, 5.0


@dataclass(frozen=True)
class Share:
    """What one client process does. `start` is the system's monotonic clock at time 0 of the schedule.

    `sampling` are further sampling parameters of every request.
    """

    url: str
    requests: Sequence[Request]
    output: int
    incremental: bool
    start: float
    timeout_s: float
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def wanted(self, request: Request) -> int:
        """How many tokens a request asks for."""
        return self.output if request.output is None else request.output


@dataclass
class Report:
    """What one client process saw, and what it cost: CPU and wall seconds, lags of its loop in seconds."""

    outcomes: list[Outcome]
    cpu_s: float
    wall_s: float
    lags: list[float] = field(default_factory=list)


@dataclass
class _Sent:
    request: Request
    body: bytes
    at: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


def play(share: Share) -> Report:
    """Send one client's share and read its answers; JSON is read only when all of them are there."""
    waiting = [
        _Sent(request, body_of(request, share.wanted(request), share.sampling)) for request in share.requests
    ]
    cpu, begin = [0.0, 0.0], share.start
    lags: list[float] = []
    # A collection amid the run would stop the clock of every stream; nothing here makes cycles.
    collected = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            cpu[0], begin = time.process_time(), time.monotonic()
            runner.run(_run(share, waiting, lags))
            cpu[1], end = time.process_time(), time.monotonic()
    finally:
        if collected:
            gc.enable()
    outcomes = [_outcome(sent, share) for sent in waiting]
    return Report(outcomes, cpu[1] - cpu[0], end - max(begin, share.start), lags)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop, None (asyncio's own) where it is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def body_of(request: Request, output: int, more: Mapping[str, Any] | None = None) -> bytes:
    """The request's body, greedy and of exactly `output` tokens; `more` sampling parameters win."""
    sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True, **(more or {})}
    body = {"input_ids": request.ids, "sampling_params": sampling, "stream": True}
    return json.dumps(body, separators=(",", ":")).encode()


async def _run(share: Share, waiting: Sequence[_Sent], lags: list[float]) -> None:
    # A connection each: the server closes idle ones after 5 s, which a kept one would meet amid a request.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=share.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        watch = asyncio.create_task(_watch(lags, share.start))
        try:
            await asyncio.gather(*(_ask(http, share, sent) for sent in waiting))
        finally:
            watch.cancel()


async def _ask(http: aiohttp.ClientSession, share: Share, sent: _Sent) -> None:
    await asyncio.sleep(share.start + sent.request.due_s - time.monotonic())
    keep, clock = sent.reads.append, time.monotonic
    sent.at = clock()
    try:
        async with http.post(
            f"{share.url}/generate", data=sent.body, headers={"Content-Type": "application/json"}
        ) as reply:
            if reply.status != 200:
                sent.error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
                return
            read = reply.content.readany
            while data := await read():
                keep((clock(), data))
    except (aiohttp.ClientError, TimeoutError) as error:
        sent.error = repr(error)


async def _watch(lags: list[float], start: float) -> None:
    await asyncio.sleep(start - time.monotonic())
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_EVERY_S)
        lags.append(max(0.0, time.monotonic() - before - _LAG_EVERY_S))


def _outcome(sent: _Sent, share: Share) -> Outcome:
    found = Outcome(sent.request.index, sent.at, sent.at - share.start - sent.request.due_s, sent.error)
    if found.error is None:
        try:
            wanted = share.wanted(sent.request)
            found.fill(read_answer(sent.reads, wanted, incremental=share.incremental))
        except StreamError as error:
            found.error = str(error)
    return found


class Clients:
    """Client processes that live as long as the benchmark. A context manager."""

    def __init__(
        self,
        url: str,
        processes: int,
        *,
        incremental: bool,
        timeout_s: float,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.url, self.processes, self.sampling = url, processes, dict(sampling or {})
        self.incremental, self.timeout_s = incremental, timeout_s
        # Not forked: the parent may hold a CUDA context and threads.
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            # Else a client would go on with its schedule, up to the end of the run, against a dead server.
            for child in multiprocessing.active_children():
                child.terminate()
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def play(self, requests: Sequence[Request], output: int) -> list[Report]:
        """Send all requests in time, dealt out in turn, for `output` tokens if they do not say how many.

        Returns one report a process.
        """
        start = time.monotonic() + _LEAD_S
        shares = [
            Share(
                self.url,
                requests[place :: self.processes],
                output,
                self.incremental,
                start,
                self.timeout_s,
                self.sampling,
            )
            for place in range(self.processes)
        ]
        return list(self._pool.map(play, [share for share in shares if share.requests]))


def cost(reports: Sequence[Report]) -> dict[str, Any]:
    """The clients' own figures: share of a core of each process, and how late their event loops were."""
    shares = [round(report.cpu_s / report.wall_s, 4) for report in reports]
    lag = distribution([value for report in reports for value in report.lags])
    return {
        "processes": len(reports),
        "cpu_shares": shares,
        "busiest": max(shares),
        "lag_ms": lag,
        "in_the_way": max(shares) > BUSY_SHARE or (lag is not None and lag["p99"] > LAG_MS),
    }
