#!/usr/bin/env python3
"""The what-if model against measured step times; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.model_check.cli import main

if __name__ == "__main__":
    sys.exit(main())
