#!/usr/bin/env python3
"""Records of the steps of steady batches, and a check of them; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.steps_cli import main

if __name__ == "__main__":
    sys.exit(main())
