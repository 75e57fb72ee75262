"""Lets the tests of this folder import the modules beside them; the MPI tests run the same modules as scripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
