"""What the patch tool refuses, in one sentence for people."""

from __future__ import annotations

from zos_sglang.observe.errors import ToolError


class PatchError(ToolError):
    """Nothing was changed, or everything was put back; `str()` says why and what to do."""
