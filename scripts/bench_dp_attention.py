#!/usr/bin/env python3
"""Consecutive-prefill rules under DP attention on the CPU; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.dp_attention import main

if __name__ == "__main__":
    sys.exit(main())
