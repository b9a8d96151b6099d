"""Do all ranks decide alike? Each keeps what it decided, hands it round, and compares. Pure Python.

    row        one decision as a line of text; the first field in which two lines differ
    log        the scheduler thread's side: one line a launch
    exchange   the other side, in a thread of its own: publish, fetch, compare

Nobody waits: a rank that decided otherwise may hang in a collective, so there is none here.
"""
