"""scripts/bench_prefill.py as a whole, on a real server with the tiny model."""

import json

import pytest

from tests.server.conftest import CACHE
from zos_sglang.overlap.guards import PrefillRule
from zos_sglang.testing.bench import prefill_cli

pytestmark = pytest.mark.server

SMALL = (
    *("--rules", "never,always,first-token"),
    *("--chunk", "64", "--burst", "5", "--burst-in", "64", "--long", "2", "--long-in", "200"),
    *("--out-tokens", "4", "--streams", "2", "--stream-tokens", "400", "--settle-s", "0.3"),
)


def measure(out, capsys, *more):
    """The result of one call, and what it said on the way."""
    code = prefill_cli.main([*SMALL, "--cache", str(CACHE), "--out", str(out), "--json", *more])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


def test_rules_alternate_in_one_server_answer_alike_and_a_finished_run_is_not_repeated(tmp_path, capsys):
    code, data, said = measure(tmp_path, capsys, "--repeats", "1")
    assert code == 0 and data["complete"], said
    runs = {(run["load"], run["rule"]): run for run in data["runs"]}
    assert set(runs) == {(load, rule) for load in ("burst", "chunked") for rule in PrefillRule}
    for load in ("burst", "chunked"):
        assert len({tuple(runs[load, rule]["digests"]) for rule in PrefillRule}) == 1
        assert runs[load, "always"]["counts"]["reasons"]["consecutive-prefill"] > 0
        assert runs[load, "first-token"]["counts"]["reasons"]["first-token"] > 0
        assert not {"consecutive-prefill", "first-token"} & set(runs[load, "never"]["counts"]["reasons"])
        assert all(sum(run["prefills"]["tokens"]) >= 5 * 32 for run in runs.values())
    # Middle chunks owe nobody a token: only always waits for them.
    waits = {row["rule"]: row["waited"] for row in data["summary"]["rows"] if row["load"] == "chunked"}
    assert waits["first-token"] < waits["always"]

    (tmp_path / "server.log").unlink()
    code, again, _ = measure(tmp_path, capsys, "--repeats", "1", "--resume")
    assert code == 0 and again["runs"] == data["runs"] and len(again["calls"]) == 2
    assert not (tmp_path / "server.log").exists()  # nothing was missing, so no server was started
