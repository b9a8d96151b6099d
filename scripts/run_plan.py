#!/usr/bin/env python3
"""Many measurements on one machine, made in turns; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.plan import main

if __name__ == "__main__":
    sys.exit(main())
