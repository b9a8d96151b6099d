#!/usr/bin/env python3
"""Consecutive prefills under every rule, side by side; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.prefill_cli import main

if __name__ == "__main__":
    sys.exit(main())
