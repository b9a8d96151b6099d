"""Both supported releases, told apart by what the object at hand has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.scheduler import Scheduler

from zos_sglang.overlap.watch import ASKS, SAMPLED
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.settings import Settings
from zos_sglang.upstream import http, lane_build, lane_conditions, releases
from zos_sglang.upstream.releases import READBACK
from zos_sglang.upstream.versions import installed
from zos_sglang.upstream.watch_stock import StockWatch

NEWEST = installed() == "0.5.23"


def test_what_is_asked_is_what_this_release_has():
    assert releases.has_readback_call(Scheduler) is NEWEST
    assert releases.takes_app_path() is NEWEST
    assert releases.captured_decode_was_read() is NEWEST


def test_a_scheduler_without_the_newer_fields_copies_itself_and_opens_no_thinking():
    assert not releases.copies_elsewhere(SimpleNamespace())
    assert not releases.opens_thinking_itself(SimpleNamespace())
    assert releases.copies_elsewhere(SimpleNamespace(enable_async_d2h_copy=True))
    assert releases.opens_thinking_itself(SimpleNamespace(self_opened_think_start_ids=[7]))


def test_a_server_with_decode_graphs_of_a_release_that_was_not_tried_is_refused_and_forecast(monkeypatch):
    monkeypatch.setattr(lane_build, "captured_decode_was_read", lambda: False)
    monkeypatch.setattr(lane_conditions, "captured_decode_was_read", lambda: False)
    graphs = type("DecodeCudaGraphRunner", (), {})()
    runner = SimpleNamespace(decode_cuda_graph_runner=graphs)
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    found = lane_build._executor(SimpleNamespace(scheduler=scheduler), Settings(), lambda *_: None)
    assert found.refusal is Refusal.RELEASE
    (condition,) = [c for c in lane_conditions.CONDITIONS if c.refusal is Refusal.RELEASE]
    assert condition.phrases == (found.why,)
    assert condition.applies(SimpleNamespace(graphs="full"))
    assert not condition.applies(SimpleNamespace(graphs=lane_conditions.DISABLED))


# ---------------------------------------------------------------- tokenizer workers with a fixed app


@pytest.mark.parametrize(("workers", "told"), [(1, False), (4, True)])
def test_workers_that_take_no_app_of_ours_are_told_to_take_numbers(monkeypatch, caplog, workers, told):
    from sglang.srt.entrypoints.http_server import app

    monkeypatch.setattr(http, "takes_app_path", lambda: False)
    monkeypatch.setattr(app, "user_middleware", [])
    monkeypatch.delenv(http.APP_PATH_VARIABLE, raising=False)
    http.before_http_server(SimpleNamespace(tokenizer_worker_num=workers))
    assert ("takes only mode numbers" in caplog.text) is told
    assert http.APP_PATH_VARIABLE not in http.os.environ
    assert app.user_middleware[-1].cls is http.ModeNames


# ---------------------------------------------------------------- a readback that is no call of its own


class Seen(list):
    """A watch that samples the device's time and writes down what it is told, by name."""

    def __init__(self):
        self.stamps = [0] * (ASKS + 1)
        self.stamps[SAMPLED] = 1

    def __getattr__(self, name):
        return lambda *_: self.append(name)


def scheduler(with_call):
    """A scheduler whose launch and delayed sampling read back, in a call of its own or not."""
    made = SimpleNamespace(is_generation=True, result_queue=[], last_batch=None, require_mlp_sync=False)
    made.get_next_batch_to_run = made.process_batch_result = (
        made._record_scheduler_state_for_paused_engine
    ) = None
    read_back = lambda *_: None  # noqa: E731
    if with_call:
        setattr(made, READBACK, read_back)

    def run_batch(batch):
        if batch.delayed is None and with_call:
            getattr(made, READBACK)(None, batch)
        return SimpleNamespace(delay_sample_func=batch.delayed, copy_done=None)

    def sample(result, batch):
        if result.delay_sample_func is not None and with_call:
            getattr(made, READBACK)(result, batch)

    made.run_batch, made.launch_batch_sample_if_needed = run_batch, sample
    return made


@pytest.mark.parametrize("delayed", [None, lambda: None], ids=["at once", "delayed"])
def test_a_silent_readback_is_stamped_where_the_call_would_be(delayed):
    told = []
    for with_call in (True, False):
        made, seen = scheduler(with_call), Seen()
        watch = StockWatch(made)
        watch.install(seen)
        batch = SimpleNamespace(delayed=delayed, forward_mode=None)
        made.launch_batch_sample_if_needed(made.run_batch(batch), batch)
        watch.remove()
        told.append([name for name in seen if name != "begin"])
    assert told[0] == told[1]
    assert told[0].count("reading_back") == told[0].count("read_back") == 1
