"""The parts of our event loop that differ between the roles of prefill/decode disaggregation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from sglang.srt.utils import DynamicGradMode

from zos_sglang.overlap.account import Account
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.upstream.disagg_decode import DecodeLauncher, DecodePort
from zos_sglang.upstream.disagg_prefill import PrefillDevice, PrefillPort
from zos_sglang.upstream.port import SglangDevice, SglangLauncher, SglangPort
from zos_sglang.upstream.roles import COLOCATED, DECODE, PREFILL, Role


class RoleParts(NamedTuple):
    """Host side, forward side, and the class of their launcher."""

    port: SglangPort
    device: SglangDevice
    launcher: type[SglangLauncher]


def make_parts(role: Role, scheduler: Any, pins: PinRing, account: Account, wait: str) -> RoleParts:
    """What one event loop of this role runs on. Arguments as in `SglangDevice`."""
    if role is PREFILL:
        prefill = PrefillPort(scheduler, pins, account)
        return RoleParts(prefill, PrefillDevice(scheduler, pins, account, wait), SglangLauncher)
    device = SglangDevice(scheduler, pins, account, wait)
    if role is DECODE:
        return RoleParts(DecodePort(scheduler, pins, account), device, DecodeLauncher)
    return RoleParts(SglangPort(scheduler, pins), device, SglangLauncher)


def grad_mode(role: Role) -> AbstractContextManager[Any]:
    """As upstream decorates the role's loop. The others may not write to tensors made in inference mode."""
    no_grad: AbstractContextManager[Any] = DynamicGradMode() if role is COLOCATED else torch.no_grad()
    return no_grad
