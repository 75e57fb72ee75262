"""Lets the tests here use what they share, and the program builder and the steps of the backends' tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "backends")]
