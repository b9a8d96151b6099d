#!/usr/bin/env python3
"""The overlap loop against stock in one live-switched server; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
