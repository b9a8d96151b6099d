"""The server of a run of arrivals: its steps as the scheduler saw them, and what its HTTP process cost.

A client sees tokens when the HTTP process gets round to them: one event a row and step, in Python, in one
thread. Beside the client's figures these tell whether a time between tokens is the scheduler's, that
process's, or a larger batch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil

from zos_sglang.observe.columns import from_columns
from zos_sglang.observe.model import median_us
from zos_sglang.observe.names import AFTER_IDLE, LANE_OPENING, PAUSED, Forward, code
from zos_sglang.observe.record import KEPT
from zos_sglang.testing.bench.arrivals import PERCENTILES
from zos_sglang.testing.bench.client import BenchClient


def records_since(client: BenchClient, before: Mapping[str, Any]) -> np.ndarray | None:
    """Records of the steps after `before`, an earlier block of ours: the last `KEPT` of them.

    None where the server records no steps. Asked for once, behind a run: they make a long answer.
    """
    if (steps := before.get("steps")) is None:
        return None
    _report(client, KEPT)
    try:
        found = from_columns(client.zos()["steps"]["last"])
    finally:
        _report(client, 0)
    kept: np.ndarray = found[found["step"] > steps["launches"]]
    return kept


def _report(client: BenchClient, steps: int) -> None:
    client.post("/set_internal_state", {"server_args": {"zos_report_steps": steps}})


def steps_of(records: np.ndarray | None) -> dict[str, Any] | None:
    """The figures of one run's records (dtype `STEP`, in order); None where nothing was decoded.

    `rows` are requests of a mean decode step, `prompts` those of a mean prefill. `itl_ms`: as the client's,
    but from output to output of the scheduler, for each row of a decode step; what lies between two decode
    steps counts. `cpu_us`: of the scheduler's thread, all that it did outside forwards, per decode step.
    `kinds`: see `_kinds`.
    """
    if records is None:
        return None
    decodes = records["forward"] == code("forward", Forward.DECODE)
    prefills = records["forward"] == code("forward", Forward.EXTEND)
    decode, prefill = records[decodes], records[prefills]
    if len(decode) < 2:
        return None
    cpu = records["cpu"].clip(0) - records["cpu_forward"].clip(0)
    # Steps of one stretch have no idle or paused server between them.
    stretch = np.cumsum((records["flags"] & (AFTER_IDLE | PAUSED)) != 0)[decodes]
    return {
        "decode": len(decode),
        "prefill": len(prefill),
        "rows": round(float(decode["rows"].mean()), 2),
        "prompts": round(float(prefill["rows"].mean()), 2) if len(prefill) else None,
        "itl_ms": _between_outputs(decode, stretch),
        "cpu_us": round(float(cpu.sum()) / 1e3 / len(decode), 1),
        "kinds": _kinds(records, prefills, decodes),
    }


def prefills_of(records: np.ndarray | None) -> dict[str, list[float | None]] | None:
    """Each prefill of one run's records by itself; None where there is none.

    Its tokens; and in ms since the first one's intake (None: nobody knows) when its launch began and had
    returned, when it was known to be done, and when its tokens were handed on.
    """
    if records is None:
        return None
    prefills = records[records["forward"] == code("forward", Forward.EXTEND)]
    if not len(prefills):
        return None
    zero = int(prefills["t_intake"][0])

    def since(column: str) -> list[float | None]:
        return [round((at - zero) / 1e6, 3) if at else None for at in prefills[column].tolist()]

    times = {
        "launch_ms": "t_launch",
        "launched_ms": "t_launched",
        "ready_ms": "t_ready",
        "output_ms": "t_output",
    }
    return {"tokens": prefills["tokens"].tolist(), **{name: since(column) for name, column in times.items()}}


def _kinds(records: np.ndarray, prefills: np.ndarray, decodes: np.ndarray) -> dict[str, dict[str, Any]]:
    """Steps by what they are, how many, and medians in microseconds (None: nobody knows).

    Kinds: prefills; the decode step behind one, which opens the lane where there is one; other openings; the
    rest. `cpu`: of the thread, the forward included; `prepare`: from intake to launch; `launch`: until it is
    queued; `output`: from intake until its tokens are handed on; `gpu`: of the forward, where it was timed.
    """
    behind = decodes & np.concatenate([[False], prefills[:-1]])
    opening = decodes & ((records["flags"] & LANE_OPENING) != 0) & ~behind
    kinds = {
        "prefill": prefills,
        "behind": behind,
        "opening": opening,
        "decode": decodes & ~behind & ~opening,
    }
    return {name: _medians(records[those]) for name, those in kinds.items()}


def _medians(steps: np.ndarray) -> dict[str, Any]:
    def median(nanoseconds: np.ndarray, known: np.ndarray) -> float | None:
        found = median_us(nanoseconds[known])
        return None if found is None else round(found, 1)

    def between(begin: str, end: str) -> float | None:
        return median(steps[end] - steps[begin], (steps[begin] > 0) & (steps[end] > 0))

    return {
        "steps": len(steps),
        "cpu": median(steps["cpu"], steps["cpu"] >= 0),
        "prepare": between("t_intake", "t_launch"),
        "launch": between("t_launch", "t_launched"),
        "output": between("t_intake", "t_output"),
        "gpu": median(steps["gpu"], steps["gpu"] > 0),
    }


def _between_outputs(decode: np.ndarray, stretch: np.ndarray) -> dict[str, float] | None:
    """Percentiles and mean over tokens (ms): of each decode step once a row, since the one before.

    A row that has just been prefilled counts as the others do. Steps of different `stretch` are apart.
    """
    when = decode["t_output"]
    known = (when[1:] > 0) & (when[:-1] > 0) & (np.diff(stretch) == 0)
    gaps = np.repeat(np.diff(when)[known], decode["rows"][1:][known]) / 1e6
    if not gaps.size:
        return None
    found = {f"p{q}": float(np.percentile(gaps, q)) for q in PERCENTILES} | {"mean": float(gaps.mean())}
    return {name: round(value, 4) for name, value in found.items()}


class HttpProcess:
    """What the server's HTTP process, which is also SGLang's tokenizer manager, spends while it is watched.

    Args:
        pid: process id of the launcher; that process answers HTTP. None: nobody watches.
    """

    def __init__(self, pid: int | None) -> None:
        self._process = None if pid is None else psutil.Process(pid)

    def seconds(self) -> float:
        """CPU seconds so far, of all its threads; 0 where nobody watches."""
        if self._process is None:
            return 0.0
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def cost(self, since: float, tokens: int, span_s: float | None) -> dict[str, float] | None:
        """Since `seconds()` was `since`: share of a core over `span_s`, and microseconds a token."""
        if self._process is None or not tokens or not span_s:
            return None
        spent = self.seconds() - since
        return {"cpu_share": round(spent / span_s, 4), "us_a_token": round(spent / tokens * 1e6, 2)}
