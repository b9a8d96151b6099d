#!/usr/bin/env python3
"""Disaggregated servers against one colocated server on the CPU; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.disaggregation import main

if __name__ == "__main__":
    sys.exit(main())
