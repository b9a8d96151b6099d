"""Whether SGLang can serve on the CPU of this machine as it stands: its resolution of flags does not ask."""

from __future__ import annotations

ON_A_CPU = "On a CPU: python -m zos_sglang.testing.server MODEL [FLAG ...], or make serve MODEL=path."
NO_DEVICE = f"There is no accelerator here. {ON_A_CPU}"
#: What SGLang's own way onto a CPU takes.
ENGINE = "SGLang's CPU engine (SGLANG_USE_CPU_ENGINE=1) and its kernels, an sgl-kernel built for the CPU"


def lacking(device: str) -> str | None:
    """What a server on this device needs and does not have here; None if nothing, or if it is no CPU.

    Without its engine, and without a platform of somebody's, SGLang takes the CPU for a GPU of a kind that it
    does not know, and fails while it builds the model.
    """
    from sglang.srt.platforms import current_platform
    from sglang.srt.utils import is_cpu

    if device.partition(":")[0] != "cpu" or current_platform.is_out_of_tree() or is_cpu():
        return None
    return f"--device cpu needs {ENGINE}, which is not on PyPI. {ON_A_CPU}"
