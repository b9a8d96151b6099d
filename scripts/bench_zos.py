#!/usr/bin/env python3
"""Every mode against stock, true sync and the GPU's floor; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.zos_cli import main

if __name__ == "__main__":
    sys.exit(main())
