"""Lets the tests here import the modules beside them, which the MPI tests also run as scripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
