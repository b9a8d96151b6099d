"""What the words of a record mean, for people who read a report."""

from __future__ import annotations

PATHS = {
    "sync": "the result before was processed first: no overlap",
    "overlap": "launched while the result before was pending",
    "overlap-blocked": "overlapped, but the scheduler's thread was held up",
    "resident": "a step of the resident decode lane",
    "resident-blocked": "a step of the lane that was held up",
    "nothing-pending": "no result was pending: nothing to overlap with",
}

REASONS = {
    "overlapped": "nothing spoke against it",
    "nothing-pending": "no result was pending: the first step after idle, or of one request alone",
    "consecutive-prefill": "a prefill after a prefill, and the rule says to finish the first",
    "first-token": "a client waits for the first token of the prefill before",
    "early-first-token": "a first token was there already, and a client waited for it",
    "grammar-sync": "the grammar must see the token before the next mask is built",
    "mode-sync": "mode sync never overlaps",
    "guard-failed": "a guard itself failed, so the launch was made safe",
    "overlap-off": "the server runs with --disable-overlap-schedule",
}

BLOCKS = {
    "host-lengths": "the launch needed sequence lengths on the host",
    "copy": "the copy of the tokens to the host took long",
    "cpu-bound": "the thread is slower than the device: results were there before the next launch",
}

DEPARTURES = {
    "intake": "a message arrived",
    "finish": "a request finished",
    "length-limit": "a request reached a length limit",
    "pool-full": "no KV slots were free for a further window",
    "exit": "the server exits, or the mode changed",
    "fault": "the lane itself failed",
}

SIGNS = {
    "cpu-over-wall": ("Thread CPU over wall", "the share of a step in which the scheduler's thread works"),
    "ready-to-launch": (
        "Result ready to next launch",
        "how long a result has been there when the next forward is called; below 0: not yet there",
    ),
    "interval-over-gpu": (
        "Launch interval over GPU time",
        "near 1: the device is never idle between two steps",
    ),
    "token-time": ("Time per output token, P50", "as a client sees it"),
}

VERDICTS = {"with": "with overlap", "without": "without overlap", "cannot-tell": "cannot tell"}

DELIVERIES = {
    "steady": "Output comes evenly.",
    "bursts": "Output comes in bursts although the steps are even: something between scheduler and client "
    "holds it back.",
    "slow-gpu": "Output comes evenly at the pace of the device: the device is what takes the time.",
}

WORKS = {
    "prepare": "intake, selection, inputs, launch",
    "readback": "queueing the copy to the host",
    "process": "results and output",
    "depends": "preparation that needs the sample before",
    "forward": "the forward itself (a device that is not asynchronous)",
}

TIMELINE = (
    "Schedule and processing are one thread; forward and copy are the device. An arrow leads from a launch "
    "to the processing of its result: with overlap the next step is launched before the arrow ends."
)
HANDLING = (
    "Wheel, + and - zoom; dragging and arrow keys move; point at a slice for its step. The strip above the "
    "tracks shows all steps by path:"
)
JUDGED = (
    "Each is judged by itself, over adjacent decode steps of the newest mode and the commonest batch size."
)
COST = (
    "Microseconds a step: how much longer the launch interval of such steps is (median) than that of "
    "overlapped steps of the same kind and size; - where there are too few of either to compare."
)
CPU = "Mean of a step, by path. Every microsecond of the thread belongs to one class."
