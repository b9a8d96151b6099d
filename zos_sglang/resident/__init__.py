"""The resident decode lane: while the running batch is stable, no step depends on what only the CPU knows.

Tokens, positions, lengths and KV slots of a decode batch stay on the device from step to step; the host
queues the next step before it looks at the result of the last. `lane.py` is the state machine,
`eligibility.py` names why a batch may not ride, `window.py` owns KV slots taken ahead of time, an executor
(`executor.py`) runs the steps, `readback.py` brings tokens home, `rows.py` says which rows need the host.
"""
