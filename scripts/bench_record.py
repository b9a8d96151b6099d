#!/usr/bin/env python3
"""What recording every step costs a real server; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.record_cost import main

if __name__ == "__main__":
    sys.exit(main())
