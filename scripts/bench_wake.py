#!/usr/bin/env python3
"""What Python costs after its thread has slept for a device; see --help. All of it is in zos_sglang."""

import sys

from zos_sglang.testing.bench.wake import main

if __name__ == "__main__":
    sys.exit(main())
