"""Into SGLang's own overlapped loop and out of it, between two steps."""

from __future__ import annotations

from typing import Any


class SwitchMode(Exception):
    """Leaves upstream's loop at a step boundary; nothing of the step has happened yet."""


def leave_stock(*_: Any, **__: Any) -> Any:
    raise SwitchMode


def bridge_into_stock(scheduler: Any, port: Any) -> None:
    """Let upstream's loop continue behind a batch whose result is processed already.

    That loop takes for granted that a last batch has its result in the queue, and it starts with an
    empty queue. So its first intake is replaced by one launch through upstream's own calls, after
    which both hold; the intake of this iteration has happened before the switch.

    Args:
        scheduler: upstream's.
        port: selects as the loop of the scheduler's role does.
    """

    def first_intake(*_: Any, **__: Any) -> list[Any]:
        del scheduler.ingest_requests
        batch = port.select()
        if batch is not None:
            result = scheduler.run_batch(batch)
            scheduler._apply_war_barrier()
            scheduler.result_queue.append((batch.copy(), result))
            if scheduler.is_generation:
                scheduler.launch_batch_sample_if_needed(result, batch)
        scheduler.last_batch = batch
        return []

    scheduler.ingest_requests = first_intake
