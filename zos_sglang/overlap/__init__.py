"""The scheduling core: plain Python over small protocols.

Nothing in this package imports SGLang or torch, so a fake scheduler on a virtual clock can drive
every line of it in a property test. What each module owns:

- `result_queue`: the results that are launched and not yet processed, and their order
- `guards`: the one decision per launch, and its reason
- `streams`: the three streams and every wait between them
- `isolation`: what a forward may change, and how long its tensors stay referenced
- `row_ledger`: who wrote and who may read a row of the future map (debug mode)
- `launch`: one launch, from the waits to the queued readback
- `event_loop`: one iteration, in its order
- `account`: the counts by reason and path, and the last decisions
- `stall`: the watchdog that says what everybody waits for
"""
