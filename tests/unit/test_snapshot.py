"""The cheap snapshot of a batch is upstream's copy, field by field."""

from dataclasses import fields

from sglang.srt.managers.schedule_batch import ScheduleBatch

from zos_sglang.upstream.snapshot import kept_fields, make_snapshot


def filled(cls=ScheduleBatch):
    """A batch with another value in every field."""
    batch = cls(reqs=["first", "second"])
    for number, field in enumerate(f for f in fields(ScheduleBatch) if f.name != "reqs"):
        setattr(batch, field.name, f"value {number}")
    return batch


def test_a_snapshot_holds_what_upstreams_copy_holds_and_nothing_else():
    batch = filled()
    assert vars(make_snapshot()(batch)) == vars(batch.copy())
    assert set(kept_fields()) > {"forward_mode", "seq_lens_cpu", "req_pool_indices"}
    assert "sampling_info" not in kept_fields()


def test_a_snapshot_keeps_its_requests_when_the_batch_moves_on():
    batch = filled()
    snapshot = make_snapshot()(batch)
    batch.reqs.clear()
    batch.forward_mode = "later"
    assert snapshot.reqs == ["first", "second"]
    assert snapshot.forward_mode != "later"


def test_a_batch_of_another_class_is_copied_by_its_own_method():
    class Other(ScheduleBatch):
        def copy(self):
            return "its own copy"

    assert make_snapshot()(filled(Other)) == "its own copy"


def test_a_field_that_upstream_adds_to_its_copy_is_kept_too(monkeypatch):
    original = ScheduleBatch.copy

    def copy(self):
        new = original(self)
        new.input_ids = self.input_ids
        return new

    assert "input_ids" not in kept_fields()
    monkeypatch.setattr(ScheduleBatch, "copy", copy)
    batch = filled()
    assert make_snapshot()(batch).input_ids == batch.input_ids
