"""One fixed-size record a step, in a preallocated ring.

All times are nanoseconds of `time.perf_counter_ns()`. A time that is not known is 0, a duration that is not
known is -1.
"""

from __future__ import annotations

import numpy as np

#: Points in time. begin of the iteration; selection begins (intake is done); the launch begins; the model's
#: forward (or the lane's step) is called; the launch has returned; processing of the result begins; the
#: result was known to be there (how: column `ready`); result processed, output sent.
TIMES = ("t_intake", "t_select", "t_launch", "t_forward", "t_launched", "t_process", "t_ready", "t_output")

#: Durations. Of the iteration that launched the step: `wall`, and `cpu` of the scheduler's thread with its
#: parts: the four classes of `names.Work`, and `cpu_forward`, which is 0 where the device is asynchronous
#: (a launch is preparation there) and the device's own work where it is not; the five sum to `cpu`.
#: Of the result: `wait` for it. `blocked`: what column `block` cost. From device events, sampled: `gpu`
#: (start to end of the forward), `gpu_gap` (end of the step before to this start), `d2h` (end of the
#: forward to end of the copy).
DURATIONS = (
    *("wall", "cpu", "cpu_prepare", "cpu_readback", "cpu_process", "cpu_depends", "cpu_forward"),
    *("wait", "blocked", "gpu", "gpu_gap", "d2h"),
)

#: Requests in the batch; tokens computed; requests waiting at the launch.
COUNTS = ("rows", "tokens", "waiting")

#: Words as numbers (see `names`), the number of results pending at the launch (`depth`), bits (`flags`).
SMALL = (
    *("mode", "path", "reason", "block", "forward", "barrier", "refusal", "departure", "depth"),
    *("ready", "flags", "pad"),
)

STEP = np.dtype(
    [("step", "<i8")]
    + [(name, "<i8") for name in (*TIMES, *DURATIONS)]
    + [(name, "<i4") for name in COUNTS]
    + [(name, "u1") for name in SMALL]
)

#: A record as one piece: numpy copies the fields of records one by one.
_WHOLE = np.dtype((np.void, STEP.itemsize))

#: Steps that a ring keeps.
KEPT = 4096


class Ring:
    """The last `size` records. Written and read by the scheduler's thread.

    Args:
        size: records kept.
    """

    def __init__(self, size: int = KEPT) -> None:
        self.size = size
        self._rows = np.zeros(size, STEP)
        self._whole = self._rows.view(_WHOLE)
        #: The newest step written; steps are numbered from 1.
        self.newest = 0

    def write(self, records: np.ndarray) -> None:
        """Put down records of dtype `STEP`, in order; of more than there is room for, the last ones."""
        if len(records):
            records = records[-self.size :]
            self._whole[records["step"] % self.size] = records.view(_WHOLE)
            self.newest = max(self.newest, int(records["step"][-1]))

    def patch(self, step: int, field: str, value: int) -> bool:
        """Change one field of a record that is still there; False if it is not."""
        row = self._rows[step % self.size]
        if step <= 0 or row["step"] != step:
            return False
        row[field] = value
        return True

    def since(self, step: int) -> np.ndarray:
        """A copy of the records after `step`, in order; those that the ring has lost are missing."""
        first = max(step + 1, self.newest - self.size + 1, 1)
        places = np.arange(first, self.newest + 1)
        found = self._whole[places % self.size].view(STEP)
        # Steps are written when their result is processed; a place may still hold an older one.
        return found[found["step"] == places]

    def last(self, count: int) -> np.ndarray:
        """A copy of the last `count` records, in order."""
        return self.since(max(0, self.newest - count))

    def clear(self) -> None:
        """Forget all records; numbering goes on."""
        self._rows["step"] = 0
