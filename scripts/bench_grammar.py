#!/usr/bin/env python3
"""What structured output costs a decode step; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.grammar_cli import main

if __name__ == "__main__":
    sys.exit(main())
