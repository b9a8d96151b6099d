"""Hostile input for everything that reads what others wrote; `scripts/fuzz.py` runs it at length.

    hostile    values and cuts that break readers
    runner     so many inputs of one target with hypothesis, the smallest failing one
    one file a target: settings, control, trace, patches, ranks

A target is a strategy, which starts from something valid and damages it, and a check, which lets through only
what the reader promises to raise.
"""
