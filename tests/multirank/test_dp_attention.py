"""DP attention over two ranks on the CPU: stock's answers, equal decisions, no hang when a rank is late."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.conftest import CACHE
from zos_sglang.overlap.guards import PrefillRule
from zos_sglang.testing import dp_jitter
from zos_sglang.testing.bench.dp_attention import set_rule
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.dp_server import RANKS, DpServer, Hung, watched
from zos_sglang.testing.models import make_tiny
from zos_sglang.testing.rank_jitter import HELD_UP, TOLD

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

SEED, LATE_RANK = 11, 1
STEPS = 10_000
#: Nothing moves for so long: a hang. The longest delay that is injected is a tenth of a second.
HANG_S = 60.0
WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "was", "for", "on", "as", "with")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start servers, one at a time: each has two ranks, and each rank wants a core."""
    running = []

    def make(mode, env=None):
        while running:
            running.pop().stop()
        log = tmp_path_factory.mktemp("dp") / "server.log"
        server = DpServer(make_tiny("qwen3", CACHE / "tiny-qwen3"), mode=mode, env=env, log=log)
        running.append(server)
        server.start()
        return server

    yield make
    while running:
        running.pop().stop()


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    return tmp_path_factory.mktemp("stacks")


@pytest.fixture(scope="module")
def ours(start, stacks):
    """One rank is late now and then, in every test here; rules and modes change while it runs."""
    plugins = distribution(stacks, "dp-tests", "1.0", dp_jitter.ENTRY)
    jitter = {dp_jitter.JITTER: f"{LATE_RANK}:{SEED}", dp_jitter.FOLDER: str(stacks)}
    return start("overlap", {**plugins, **jitter, "ZOS_STRICT": "1"})


@pytest.fixture(scope="module")
def stock_answers(start):
    return wave(start(None))


def body(text, rank, new, stream=False, **more):
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"text": text, "routed_dp_rank": rank, "stream": stream, "sampling_params": params, **more}


def ask(client, alive=lambda: None, **request):
    """The answer's text and finish reason; `alive` is called for every piece."""
    with client.stream("POST", "/generate", json=request) as response:
        response.raise_for_status()
        lines = []
        for line in response.iter_lines():
            alive()
            lines += [line.removeprefix("data: ")] if line.strip(" \n") not in ("", "data: [DONE]") else []
    last = json.loads(lines[-1])
    return last["text"], last["meta_info"]["finish_reason"]


def prompt(chance):
    """One token or several chunks."""
    return " ".join(chance.choice(WORDS) for _ in range(chance.choice((1, 8, 30, 120))))


def user(server):
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(base_url=server.url, timeout=300, trust_env=False, limits=limits)


def wave(server):
    """A burst on both ranks, mostly streaming; its answers in the order asked."""
    chance = random.Random(SEED)
    bodies = [body(f"{i} {prompt(chance)}", i % RANKS, 4 + 3 * i, stream=i % 4 != 3) for i in range(14)]
    with user(server) as client, ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda one: ask(client, **one), bodies))


def switch(server, mode):
    answer = httpx.post(
        f"{server.url}/set_internal_state",
        json={"server_args": {"zos_mode": mode}},
        trust_env=False,
        timeout=60,
    )
    assert answer.json() == [True] * RANKS, answer.text


# ---------------------------------------------------------------- answers


def gained(before, server):
    """How often each reason was given since, by rank."""
    pairs = zip(before, server.states(), strict=True)
    return [{name: n - old["reasons"][name] for name, n in new["reasons"].items()} for old, new in pairs]


@pytest.mark.parametrize("rule", list(PrefillRule))
def test_answers_are_stocks_and_the_ranks_decide_alike_by_the_rule_in_effect(stock_answers, ours, rule):
    set_rule(ours.url, rule)
    before = ours.states()
    assert wave(ours) == stock_answers
    first, second = gained(before, ours)
    assert first == second
    assert first["overlapped"] > 20 and first["guard-failed"] == 0
    assert (first["consecutive-prefill"] > 0) is (rule == "always")
    assert (first["first-token"] > 0) is (rule == "first-token")


@pytest.mark.parametrize("mode", ["resident", "stock", "sync", "overlap"])
def test_every_mode_answers_like_stock_and_the_lane_stays_closed_by_name(stock_answers, ours, mode):
    switch(ours, mode)
    assert wave(ours) == stock_answers
    states = ours.states()
    assert [state["mode"] for state in states] == [mode] * RANKS
    assert states[0]["reasons"] == states[1]["reasons"]
    if mode == "resident":
        assert [state["lane"]["refused"] for state in states] == [{"dp-attention": 1}] * RANKS
        assert [state["lane"]["opened"] for state in states] == [0] * RANKS


def test_modes_change_under_requests_and_all_ranks_go_along(stock_answers, ours):
    before = ours.states()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(wave, ours)
        for mode in ("stock", "resident", "sync", "overlap", "stock", "overlap"):
            switch(ours, mode)
            time.sleep(0.05)
        assert running.result() == stock_answers
    for old, new in zip(before, ours.states(), strict=True):
        assert new["paths"]["mode-switches"] - old["paths"]["mode-switches"] == 6
        assert new["paths"]["fallbacks"] == 0


# ---------------------------------------------------------------- a late rank


def launches(state):
    return sum(state["reasons"].values())


def play(server, alive, steps):
    """One rank decodes while the other one prefills, idles, or both by turns; then the other way round."""
    chance, answers = random.Random(SEED), {}

    def check(request):
        """Whatever else runs, a prompt has one answer."""
        known = request["text"], request["sampling_params"]["max_new_tokens"]
        answer = ask(client, alive, **request)
        assert answers.setdefault(known, answer) == answer, known

    def burst(rank, plan):
        for text, new, pause_s in plan:
            check(body(text, rank, new, stream=new > 1))
            time.sleep(pause_s)

    with user(server) as client, ThreadPoolExecutor(6) as pool:
        turn = 0
        while min(launches(state) for state in server.states()) < steps:
            steady, bursty = turn % RANKS, (turn + 1) % RANKS
            plans = [
                [(prompt(chance), chance.choice((1, 1, 2, 5)), chance.choice((0, 0, 0.02))) for _ in range(8)]
                for _ in range(chance.choice((0, 2, 4)))
            ]
            # Mostly in one piece: reading a stream takes a core from the ranks.
            jobs = [pool.submit(check, body(f"turn {turn % 10}", steady, 400, stream=turn % 4 == 0))]
            jobs += [pool.submit(burst, bursty, plan) for plan in plans]
            for job in jobs:
                job.result()
            turn += 1
            time.sleep(chance.choice((0, 0.05)))


def test_ten_thousand_steps_with_a_late_rank_do_not_hang_and_both_ranks_decide_alike(ours, stacks):
    set_rule(ours.url, PrefillRule.FIRST_TOKEN)
    before = ours.states()
    watched(ours, stacks, lambda alive: play(ours, alive, launches(before[0]) + STEPS), HANG_S)
    first, second = gained(before, ours)
    assert first == second and sum(first.values()) >= STEPS
    assert min(first[reason] for reason in ("overlapped", "nothing-pending", "first-token")) > 10
    assert first["guard-failed"] == 0
    for old, new in zip(before, ours.states(), strict=True):
        paths = {name: n - old["paths"][name] for name, n in new["paths"].items()}
        assert paths["prefill"] > 100 and paths["middle-chunk"] > 20 and paths["fallbacks"] == 0
        # It has been idle beside a busy rank: such a launch has no rows and counts as neither.
        assert paths["prefill"] + paths["decode"] < sum(first.values()) - 100
    held_up = {line.partition("] ")[2] for line in ours.log_text().splitlines() if "rank_jitter: " in line}
    assert held_up == {TOLD.format(what=HELD_UP, place=place) for place in dp_jitter.PLACES}


def test_a_hang_is_noticed_and_both_ranks_stacks_are_shown(ours, stacks):
    """The last test of this server: it never comes back."""

    def hang(alive):
        with user(ours) as client:
            ask(client, alive, **body("never answered", LATE_RANK, 4, rid=dp_jitter.HANG))

    with pytest.raises(Hung) as hung:
        watched(ours, stacks, hang, 5.0)
    first, second = sorted(str(hung.value).split("sglang::scheduler_")[1:])
    assert first.startswith("DP0_TP0") and second.startswith("DP1_TP1")
    assert "in behind" in second and "in behind" not in first
    # It waits for the other one in whatever they do together next.
    assert any(word in first for word in ("all_gather", "all_reduce", "broadcast"))
