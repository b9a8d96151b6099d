"""A prefill server, a decode server, a balancer: our loops against SGLang's own and one colocated server."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import STRICT, tiny_model
from zos_sglang.testing import disagg_events
from zos_sglang.testing.disagg_events import LEAVING, LOADING
from zos_sglang.testing.disaggregation import Disaggregated, transfer_env
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.server import ServerProcess
from zos_sglang.testing.transfer.mooncake.engine import DELAY_VARIABLE

__all__ = ["tiny_model"]

pytestmark = pytest.mark.server

#: Chunks of long prompts, and pages, so that a chunk's last page may have to wait for the next one.
ARGS = (
    *("--chunked-prefill-size", "64", "--page-size", "4"),
    *("--max-running-requests", "24"),
)
#: Transfers that take so long are still under way when others decode.
SLOW = {DELAY_VARIABLE: "0.05"}
PREFIX = "a prefix that many requests share, long enough for several pages of the cache; "


class User:
    """Sends requests to one URL."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=300, trust_env=False)

    def ask(self, text: str, tokens: int = 16, rid: str | None = None, **params: Any) -> httpx.Response:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **params}
        return self.http.post("/generate", json={"text": text, "sampling_params": sampling, "rid": rid})

    def text(self, text: str, tokens: int = 16, rid: str | None = None, **params: Any) -> str:
        answer = self.ask(text, tokens, rid, **params)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["text"]
        return found

    def stream(self, text: str, tokens: int) -> list[str]:
        """The text so far, at each piece of a streamed answer."""
        body = {"text": text, "stream": True, "sampling_params": {"temperature": 0, "ignore_eos": True}}
        body["sampling_params"]["max_new_tokens"] = tokens
        with self.http.stream("POST", "/generate", json=body) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        return [json.loads(line)["text"] for line in lines]

    def workload(self) -> list[str]:
        """Short and chunked prompts, shared prefixes, a grammar and a stream, all at once; the answers."""
        jobs = [lambda i=i: self.text(f"request {i}", 6 + 5 * i) for i in range(6)]
        jobs += [lambda i=i: self.text(f"{i} " + "a long prompt in chunks " * 12, 9) for i in range(3)]
        jobs += [lambda i=i: self.text(PREFIX + f"and end {i}", 8) for i in range(4)]
        jobs += [lambda i=i: self.text(f"in letters {i}", 24, regex="[a-z]{4,12}\\.") for i in range(3)]
        jobs += [lambda: self.stream("told bit by bit", 20)[-1]]
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(lambda job: job(), jobs))


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory) -> Iterator[Disaggregated]:
    folder = tmp_path_factory.mktemp("disaggregated")
    plugin = distribution(folder, "disagg-events", "1.0", disagg_events.ENTRY)["PYTHONPATH"]
    env = {**STRICT, **SLOW, "PYTHONPATH": os.pathsep.join([plugin, transfer_env()["PYTHONPATH"]])}
    pd = Disaggregated(tiny_model, ("overlap", "resident"), folder=folder, args=ARGS, env=env)
    with pd:
        yield pd


@pytest.fixture(scope="module")
def colocated(pair, tiny_model, tmp_path_factory) -> Iterator[list[str]]:
    """Answers of stock SGLang in one server."""
    log = tmp_path_factory.mktemp("colocated") / "server.log"
    with ServerProcess(tiny_model, mode=None, args=ARGS, env=STRICT, log=log) as server:
        yield User(server.url).workload()


@pytest.fixture
def user(pair) -> User:
    return User(pair.url)


def switch(pair: Disaggregated, prefill: str, decode: str) -> None:
    """Change the modes of both servers; takes effect at a step boundary."""
    for role, mode in (("prefill", prefill), ("decode", decode)):
        answer = User(pair.servers[role].url).http.post(
            "/set_internal_state", json={"server_args": {"zos_mode": mode}}
        )
        assert answer.json() == [True], answer.text


def paths(pair: Disaggregated, role: str) -> dict[str, int]:
    counted: dict[str, int] = pair.zos(role)["paths"]
    return counted


def settled(pair: Disaggregated) -> bool:
    """Whether nothing is left in either server: only then SGLang flushes its cache, and checks its pools."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done = [User(server.url).http.post("/flush_cache").status_code for server in pair.servers.values()]
        if done == [200, 200]:
            return True
        time.sleep(0.1)
    return False


def test_the_start_up_lines_name_the_roles(pair):
    for role, mode in (("prefill", "overlap"), ("decode", "resident")):
        (line,) = [x for x in pair.servers[role].log_text().splitlines() if "zos-sglang 0" in x]
        assert f"mode {mode}" in line and line.endswith(f"overlap on; {role} role of disaggregation")
        assert pair.zos(role)["role"] == role


def test_answers_equal_those_of_one_colocated_server_in_every_mode(pair, user, colocated):
    """Stock first: SGLang's own loops in the same two servers, then each of ours, by live switches."""
    modes = [("stock", "stock"), ("overlap", "resident"), ("sync", "sync"), ("overlap", "overlap")]
    for prefill, decode in modes:
        switch(pair, prefill, decode)
        user.http.post("/flush_cache")
        assert user.workload() == colocated, (prefill, decode)
        assert [pair.zos(role)["mode"] for role in ("prefill", "decode")] == [prefill, decode]
    assert paths(pair, "prefill")["fallbacks"] == paths(pair, "decode")["fallbacks"] == 0


def test_modes_change_while_requests_are_in_every_queue(pair, user, colocated):
    switch(pair, "overlap", "resident")
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(user.workload)
        for prefill, decode in [("stock", "stock"), ("sync", "overlap"), ("overlap", "resident")] * 3:
            time.sleep(0.1)
            switch(pair, prefill, decode)
        assert answers.result() == colocated
    assert settled(pair)


def test_a_chunk_is_sent_once_by_its_result_or_by_the_launch_of_the_next_one(pair, user):
    """In mode overlap the next launch comes first and sends what is in the cache; in sync the result."""
    for mode, chunks_by in (("overlap", "kv-sent-early"), ("sync", "kv-sent-middle")):
        switch(pair, mode, "resident")
        before = paths(pair, "prefill")
        user.text(f"{mode} " + "chunked " * 60, 4)
        after = paths(pair, "prefill")
        assert after["middle-chunk"] > before["middle-chunk"]
        assert after[chunks_by] > before[chunks_by]
        assert after["kv-sent-last"] == before["kv-sent-last"] + 1
    switch(pair, "overlap", "resident")


def test_a_cached_prefix_is_sent_before_its_suffix_is_computed(pair, user):
    before = paths(pair, "prefill")["kv-sent-early"]
    first = user.text(PREFIX * 2 + "x", 6)
    assert user.text(PREFIX * 2 + "x", 6) == first
    assert paths(pair, "prefill")["kv-sent-early"] > before


def test_what_the_host_cache_may_still_write_is_sent_with_its_result_up_to_the_end_remembered(pair, user):
    """No launch sends a chunk early then: each is sent when its result is processed, once, and not beyond."""
    switch(pair, "overlap", "resident")
    prompt = "held back " + "chunked " * 60
    wanted = user.text(prompt, 8)
    assert settled(pair)
    before = paths(pair, "prefill")
    assert user.text(prompt, 8, LOADING + "1") == wanted
    after = paths(pair, "prefill")
    gained = {name: after[name] - before[name] for name in after}
    assert gained["middle-chunk"] > 2
    assert gained["early-send-held"] == gained["kv-sent-middle"] == gained["middle-chunk"]
    assert gained["kv-sent-early"] == 0 and gained["kv-sent-last"] == 1


def test_rows_that_end_leave_the_lane_of_the_decode_role_while_the_rest_rides_on(pair, user):
    def answers() -> list[str]:
        jobs = [lambda: user.text("one long answer", 300)]
        jobs += [lambda i=i: user.text(f"ends {i}", 60, regex=f"[a-z]{{{8 + 4 * i}}}\\.") for i in range(4)]
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(lambda job: job(), jobs))

    switch(pair, "overlap", "stock")
    wanted = answers()
    switch(pair, "overlap", "resident")
    before = pair.zos("decode")["lane"]
    assert answers() == wanted
    after = pair.zos("decode")["lane"]
    assert after["rows_left"] > before["rows_left"] and after["faults"] == 0
    assert settled(pair)


def test_the_lane_stays_open_while_kv_is_on_its_way_and_closes_when_it_has_arrived(pair, user):
    switch(pair, "overlap", "resident")
    before = pair.zos("decode")["lane"]
    arrived = paths(pair, "decode")["kv-arrived"]
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(user.text, "one long answer", 3000)
        deadline = time.monotonic() + 60
        while pair.zos("decode")["lane"]["steps"] < before["steps"] + 5:
            assert time.monotonic() < deadline, "the lane never opened"
            time.sleep(0.02)
        # Each takes half a second until its KV is there: ten chunks.
        joined = [user.text(f"joins {i} " + "in chunks " * 150, 3) for i in range(3)]
        assert not long.done() and len(joined) == 3
        after = pair.zos("decode")["lane"]
        long.result()
    steps, decodes = (after[name] - before[name] for name in ("steps", "decode_steps"))
    assert paths(pair, "decode")["kv-arrived"] == arrived + 4
    assert after["left"]["intake"] >= before["left"].get("intake", 0) + 3
    assert after["faults"] == 0
    # Had it been closed during the transfers, most steps would have gone the ordinary way.
    assert steps > 50 and steps / decodes > 0.8


def abort_while_prefilling(pair: Disaggregated, user: User, after_s: float) -> bool:
    """Abort one long prompt after so many seconds; whether a chunk of it was launched then."""
    before = paths(pair, "prefill")["aborted-after-launch"]
    rid = f"gone-{after_s}"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(user.ask, f"{after_s} " + "to be aborted " * 220, 100, rid)
        time.sleep(after_s)
        assert user.http.post("/abort_request", json={"rid": rid}).status_code == 200
        job.result()
    return paths(pair, "prefill")["aborted-after-launch"] > before


def test_a_chunk_can_be_aborted_after_its_launch(pair, user):
    """Tried at different times until one was caught between launch and processing."""
    assert any(abort_while_prefilling(pair, user, 0.05 + 0.015 * i) for i in range(40))
    assert settled(pair)


def test_a_request_can_be_aborted_in_every_queue(pair, user, colocated):
    """Before its chunks, while its KV is on its way, while it decodes; nothing is left behind."""
    with ThreadPoolExecutor(12) as pool:
        jobs = []
        for i in range(12):
            jobs.append(pool.submit(user.ask, f"{i} " + "to be aborted " * 50, 200, rid=f"gone-{i}"))
            time.sleep(0.03)
        for i in range(12):
            user.http.post("/abort_request", json={"rid": f"gone-{i}"})
            time.sleep(0.02)
        for job in jobs:
            job.result()
    assert settled(pair)
    assert user.workload() == colocated


def test_a_prompt_that_no_decode_server_waits_for_is_abandoned(pair, user):
    """Its sender is set up and then given up; the servers go on."""
    before = paths(pair, "prefill")["bootstrap-abandoned"]
    alone = User(pair.prefill.url)
    body = {
        "text": "nobody fetches this",
        "rid": "alone",
        "sampling_params": {"max_new_tokens": 1},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.bootstrap_port,
        "bootstrap_room": 12345,
    }
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(alone.http.post, "/generate", json=body)
        deadline = time.monotonic() + 60
        while not job.done():  # an abort that comes before its request aborts nothing
            assert time.monotonic() < deadline, "it waits for a decode server for ever"
            time.sleep(0.5)
            alone.http.post("/abort_request", json={"rid": "alone"})
        job.result()
    assert settled(pair)
    assert paths(pair, "prefill")["bootstrap-abandoned"] > before
    assert user.text("and after it", 4)


def test_both_roles_drain_on_exit_and_kv_on_its_way_still_arrives(pair, user):
    """The last test: first the prefill server ends, with a launch in flight, then the decode server."""
    user.http.timeout = 60  # KV that never arrives is waited for
    switch(pair, "overlap", "resident")
    short, long = "the last one", "goes on to its end"
    wanted = user.text(short, 12), user.text(long, 400)
    before = pair.zos("decode")["lane"]["steps"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(user.stream, long, 400)
        deadline = time.monotonic() + 60
        while pair.zos("decode")["lane"]["steps"] < before + 5:
            assert time.monotonic() < deadline, "the lane never opened"
            time.sleep(0.02)
        assert user.text(short, 12, LEAVING + "1") == wanted[0]
        assert "zos-sglang: exit: 1 results drained" in pair.prefill.log_text()
        os.kill(pair.decode.pid, signal.SIGTERM)
        assert answer.result()[-1] == wanted[1]
    assert pair.decode._process.wait(timeout=60) == 0
    log = pair.decode.log_text()
    assert "zos-sglang: exit:" in log and "Scheduler hit an exception" not in log
