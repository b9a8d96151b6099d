"""`python -m zos_sglang.testing.demo`: the same requests to our server and to stock, compared.

Both servers run on the CPU in float32, one after the other, with the same flags. The exit code
is 0 only if every answer is equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zos_sglang.console import console
from zos_sglang.testing.bench.flags import json_flag
from zos_sglang.testing.models import ModelError, make_smollm2
from zos_sglang.testing.server import ServerFailed, ServerProcess

CACHE = Path(".cache")
MAX_TOKENS = 48
SIDES = {"ours": "overlap", "stock": None}
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three fruits.",
    "Write one sentence about the sea.",
    "How many days are there in a week?",
    "What do bees make?",
    "Who wrote Romeo and Juliet?",
    "Say hello in Spanish.",
)
OPENINGS = (
    "The history of glass begins",
    "Once upon a time there was",
    "To bake bread you need",
    "The largest planet of the solar system is",
    "def fibonacci(n):",
    "Water boils at",
    "In the middle of the night the train",
    "The three primary colours are",
)


@dataclass(frozen=True)
class Request:
    """One greedy request; `chat` chooses the endpoint."""

    chat: bool
    stream: bool
    prompt: str

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The JSON body, in OpenAI's format."""
        body: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": MAX_TOKENS}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass
class Answer:
    """What came back; `gaps_ms` are the times between streamed pieces (one decode step each)."""

    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)

    def same_as(self, other: Answer) -> bool:
        """Whether text, finish reason and number of tokens are equal; times may differ."""
        mine = (self.text, self.finish_reason, self.tokens)
        return mine == (other.text, other.finish_reason, other.tokens)


def make_requests(count: int) -> list[Request]:
    """`count` requests: chat and completion by turns, half of each kind streaming."""
    requests = []
    for index in range(count):
        prompts = OPENINGS if index % 2 else QUESTIONS
        prompt = prompts[index // 2 % len(prompts)]
        round_ = index // 2 // len(prompts)
        text = prompt if not round_ else f"{round_ + 1}. {prompt}"
        requests.append(Request(chat=index % 2 == 0, stream=index // 2 % 2 == 0, prompt=text))
    return requests


async def ask_all(url: str, requests: list[Request]) -> list[Answer]:
    """Send all requests at once and wait for all answers. Raises httpx.HTTPError on a failure."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        await _ask(client, Request(chat=True, stream=False, prompt="Hello"))  # warm-up
        return list(await asyncio.gather(*(_ask(client, request) for request in requests)))


async def _ask(client: httpx.AsyncClient, request: Request) -> Answer:
    answer = Answer()
    if not request.stream:
        response = await client.post(request.path, json=request.body())
        response.raise_for_status()
        _read(answer, response.json(), "message")
        return answer
    last = None
    async with client.stream("POST", request.path, json=request.body()) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if _read(answer, json.loads(line[6:]), "delta"):
                now = time.perf_counter()
                if last is not None:
                    answer.gaps_ms.append((now - last) * 1e3)
                last = now
    return answer


def _read(answer: Answer, data: dict[str, Any], part: str) -> str:
    """Add one response or streamed piece to `answer`; returns the text that it carried."""
    if usage := data.get("usage"):
        answer.tokens = usage["completion_tokens"]
    text = ""
    for choice in data["choices"]:
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        text = (choice["text"] if "text" in choice else choice[part].get("content")) or ""
        answer.text += text
    return text


@contextmanager
def _step(out: Console, what: str) -> Iterator[None]:
    """Say what is being done, how long it has been going on, and how long it took."""
    started = time.monotonic()
    with out.status(what):
        yield
    out.print(f"{what}: {time.monotonic() - started:.0f} s")


def run_side(
    out: Console, name: str, model: Path, requests: list[Request], log: Path
) -> tuple[list[Answer], dict[str, int]]:
    """Start one server, ask everything, stop it. Returns the answers and our launch reasons."""
    server = ServerProcess(model, mode=SIDES[name], log=log, cpu=True)
    try:
        with _step(out, f"Starting {name}"):
            server.start()
        with _step(out, f"Asking {name} {len(requests)} questions at once"):
            answers = asyncio.run(ask_all(server.url, requests))
        info = httpx.get(f"{server.url}/server_info", timeout=60, trust_env=False).json()
        zos = info["internal_states"][0].get("zos") or {}
        return answers, zos.get("reasons", {})
    finally:
        server.stop()


def report(out: Console, requests: list[Request], answers: dict[str, list[Answer]], overlapped: str) -> bool:
    """Print two answers, every difference and the table. Returns whether all are equal."""
    pairs = list(zip(requests, answers["ours"], answers["stock"], strict=True))
    for request, ours, _ in pairs[:2]:
        kind = "chat" if request.chat else "completion"
        out.print(f"\n[bold]{kind}:[/bold] {escape(request.prompt)}")
        out.print(escape(ours.text.strip()), style="green")
    equal = sum(ours.same_as(stock) for _, ours, stock in pairs)
    for request, ours, stock in pairs:
        if not ours.same_as(stock):
            out.print(f"\n[red]differs:[/red] {escape(request.prompt)}")
            out.print(f"  ours:  {escape(repr(ours))}\n  stock: {escape(repr(stock))}")
    table = Table(title="The same greedy requests, float32, on the CPU")
    for column in ("server", "answers equal", "requests", "tokens", "decode step", "overlapped"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, side in answers.items():
        gaps = [gap for answer in side for gap in answer.gaps_ms]
        step = f"{median(gaps):.1f} ms" if gaps else "-"
        tokens = str(sum(answer.tokens for answer in side))
        share = overlapped if name == "ours" else "-"
        table.add_row(name, f"{equal} of {len(pairs)}", str(len(side)), tokens, step, share)
    out.print()
    out.print(table)
    out.print("decode step: median time between the pieces of the streamed answers")
    return equal == len(pairs)


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 if all answers are equal, 1 if not or if a server failed."""
    parser = argparse.ArgumentParser(prog="python -m zos_sglang.testing.demo")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--requests", type=int, default=16, help="how many (default 16)")
    json_flag(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write requests, answers and times there")
    parser.add_argument("--keep-logs", action="store_true", help="keep the servers' logs")
    args = parser.parse_args(argv)
    if args.requests < 1:
        parser.error("--requests: at least 1")
    out = console(sys.stderr if args.json else None)
    logs = CACHE / "demo-logs"
    try:
        if args.model is None:
            with _step(out, "Making the demo model"):
                args.model = make_smollm2(CACHE / "smollm2")
        requests = make_requests(args.requests)
        answers, reasons = {}, {}
        for name in SIDES:
            answers[name], reasons[name] = run_side(out, name, args.model, requests, logs / f"{name}.log")
    except (ModelError, ServerFailed, httpx.HTTPError) as error:
        out.print(f"[red]demo failed:[/red] {escape(str(error) or repr(error))}")
        out.print(f"logs: {logs}")
        return 1
    launches = reasons["ours"]
    overlapped = f"{launches.get('overlapped', 0)} of {sum(launches.values())}"
    equal = report(out, requests, answers, f"{overlapped} launches")
    result = {
        "equal": equal,
        "requests": [asdict(request) for request in requests],
        **{name: [asdict(answer) for answer in side] for name, side in answers.items()},
        "reasons": launches,
    }
    if args.json:
        print(json.dumps(result))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1))
    if equal and not args.keep_logs:
        shutil.rmtree(logs, ignore_errors=True)
    else:
        out.print(f"logs: {logs}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
