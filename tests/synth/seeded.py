"""What a script prints in a process of its own, with a hash seed of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed(script: str, seed: str) -> str:
    """Standard output of a script that may import the modules of this folder; `seed` is PYTHONHASHSEED."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
