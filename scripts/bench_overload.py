#!/usr/bin/env python3
"""More streams than a server can take, every mode against stock; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.overload_cli import main

if __name__ == "__main__":
    sys.exit(main())
