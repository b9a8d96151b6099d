#!/usr/bin/env python3
"""Hostile input for everything that reads what others wrote; see --help. All of it is in tests/fuzz."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz.cli import main

if __name__ == "__main__":
    sys.exit(main())
