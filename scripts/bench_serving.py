#!/usr/bin/env python3
"""SGLang's own serving benchmark, every mode against stock; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.serving_cli import main

if __name__ == "__main__":
    sys.exit(main())
