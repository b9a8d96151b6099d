#!/usr/bin/env python3
"""Every check of the overlap loop on a CUDA device; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.gpu_cli import main

if __name__ == "__main__":
    sys.exit(main())
