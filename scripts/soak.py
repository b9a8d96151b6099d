#!/usr/bin/env python3
"""One server under load and disturbance for minutes or hours, every answer judged; see --help."""

import sys

from zos_sglang.testing.soak.cli import main

if __name__ == "__main__":
    sys.exit(main())
