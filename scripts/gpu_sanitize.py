#!/usr/bin/env python3
"""The lane's kernels under compute-sanitizer, on a CUDA device; see --help. Prints one line of JSON."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zos_sglang.testing.races.sanitizer import main

if __name__ == "__main__":
    sys.exit(main())
