#!/usr/bin/env python3
"""Regression against stock SGLang over HTTP; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.compare.cli import main

if __name__ == "__main__":
    sys.exit(main())
