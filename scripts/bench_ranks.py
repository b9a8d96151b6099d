#!/usr/bin/env python3
"""What comparing ranks costs; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.ranks import main

if __name__ == "__main__":
    sys.exit(main())
