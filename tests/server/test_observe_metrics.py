"""Our families in SGLang's own /metrics: all there from the start, and they count what happened."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import STRICT
from zos_sglang.observe.metric_families import FAMILIES, Kind
from zos_sglang.overlap.guards import Reason

pytestmark = pytest.mark.server

#: Metrics are brought up to date about once a second; a busy machine may take longer.
SOON_S = 60


class Metrics:
    """One GET of /metrics: values by sample name and labels."""

    def __init__(self, client) -> None:
        self.samples = [
            sample
            for family in text_string_to_metric_families(client.http.get("/metrics").text)
            for sample in family.samples
        ]

    def labels(self, name: str) -> dict[str, str]:
        """Those of the first sample of that name."""
        return next(sample.labels for sample in self.samples if sample.name == name)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name that have these labels."""
        return sum(
            one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items()
        )

    def by(self, label: str, name: str, **labels: str) -> dict[str, int]:
        """Sums by the values of one label, zeros left out."""
        found: Counter[str] = Counter()
        for one in self.samples:
            if one.name == name and labels.items() <= one.labels.items() and one.value:
                found[one.labels[label]] += int(one.value)
        return dict(found)


def soon(client, holds: Callable[[Metrics], bool]) -> Metrics:
    """The first scrape for which `holds`, else the last one."""
    until = time.monotonic() + SOON_S
    while not holds(found := Metrics(client)) and time.monotonic() < until:
        time.sleep(0.3)
    return found


def settled(client) -> tuple[Metrics, dict]:
    """Metrics and our block of /server_info of a server at rest, once the last steps are in both."""
    block = client.settled()
    launches = sum(block["reasons"].values())
    soon(client, lambda found: found.total("zos_steps_total") >= launches)
    # Once more: a scrape can fall between two values of one update.
    time.sleep(0.3)
    return Metrics(client), block


def told(counts: dict[str, int]) -> dict[str, int]:
    return {word: count for word, count in counts.items() if count}


@pytest.fixture(scope="module")
def client(serve, client_of):
    return client_of(serve("overlap", STRICT, ("--enable-metrics", "--served-model-name", "small")))


def test_every_family_and_label_value_is_there_with_the_labels_of_sglang(client):
    found = Metrics(client)
    theirs = found.labels("sglang:num_running_reqs")
    assert theirs["model_name"] == "small" and theirs["tp_rank"] == "0"
    there = {(one.name, frozenset(one.labels.items())) for one in found.samples}
    for family in FAMILIES:
        name = family.name + ("_count" if family.kind is Kind.HISTOGRAM else "")
        for values in product(*family.labels.values()):
            own = dict(zip(family.labels, values, strict=True))
            assert (name, frozenset((theirs | own).items())) in there
    assert found.by("mode", "zos_mode") == {"overlap": 1}


def test_counts_are_those_of_server_info(client):
    client.wave()
    found, block = settled(client)
    reasons = told(block["reasons"])
    launches = sum(reasons.values())
    assert launches > 20
    assert found.total("zos_steps_total") == launches
    assert found.total("zos_result_wait_seconds_count") == launches
    reasons.pop(Reason.OVERLAPPED.value)
    assert found.by("reason", "zos_steps_not_overlapped_total") == reasons
    forward = found.by("forward", "zos_steps_total")
    assert forward["decode"] == block["paths"]["decode"] and forward["extend"] == block["paths"]["prefill"]
    decode = found.by("path", "zos_steps_total", forward="decode")
    assert set(decode) <= {"overlap", "overlap-blocked"}
    intervals = found.total("zos_launch_interval_seconds_count")
    assert 10 < intervals < forward["decode"]
    assert found.total("zos_scheduler_cpu_seconds_total", work="prepare") > 0


def test_tokens_are_those_that_the_client_got(client):
    before, _ = settled(client)
    answer = client.generate("count the tokens of this one", 30)
    after, _ = settled(client)

    def grown(forward: str) -> float:
        name = "zos_step_tokens_total"
        return after.total(name, forward=forward) - before.total(name, forward=forward)

    # The first token comes from the prefill; one more step was launched before the end was known, or not.
    assert grown("decode") - (answer["meta_info"]["completion_tokens"] - 1) in (0, 1)
    assert grown("extend") == answer["meta_info"]["prompt_tokens"] - answer["meta_info"]["cached_tokens"]


def test_a_live_switch_shows_and_the_lane_is_counted(client):
    assert client.set_state(zos_mode="resident").json() == [True]
    assert soon(client, lambda found: found.by("mode", "zos_mode") == {"resident": 1}).by(
        "mode", "zos_mode"
    ) == {"resident": 1}
    before, _ = settled(client)
    client.wave()
    found, block = settled(client)
    lane = block["lane"]
    assert lane["steps"] > 20
    assert found.total("zos_lane_entries_total") == lane["opened"]
    assert found.total("zos_lane_tokens_total") == lane["row_steps"]
    assert found.total("zos_lane_wasted_tokens_total") == lane["wasted_row_steps"]
    assert found.total("zos_lane_rows_left_total") == lane["rows_left"]
    assert found.by("reason", "zos_lane_exits_total") == lane["left"]
    assert found.by("reason", "zos_lane_refusals_total") == lane["refused"]
    paths = found.by("path", "zos_steps_total", forward="decode")
    assert paths["resident"] + paths.get("resident-blocked", 0) == lane["steps"]
    assert found.total("zos_mode_switches_total") == block["paths"]["mode-switches"] == 1
    assert found.total("zos_steps_total") > before.total("zos_steps_total")


def test_stock_is_counted_too(client):
    before, _ = settled(client)
    assert client.set_state(zos_mode="stock").json() == [True]
    client.generate("one in stock", 40)
    wanted = before.total("zos_steps_total", forward="decode") + 39
    soon(client, lambda found: found.total("zos_steps_total", forward="decode") >= wanted)
    time.sleep(0.3)
    found = Metrics(client)
    assert found.by("mode", "zos_mode") == {"stock": 1}
    grown = found.total("zos_steps_total", forward="decode") - wanted
    assert grown in (0, 1)  # a step launched before the end was known
    assert found.total("zos_stalls_total") == found.total("zos_fallbacks_total") == 0
