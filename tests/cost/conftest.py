"""Lets the tests here use the program builder and the steps of the backends' tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "backends"))
