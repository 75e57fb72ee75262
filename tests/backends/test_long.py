"""What only thousands of steps show: growing memory, drifting state, results that differ from run to run."""

import json
from pathlib import Path

import pytest

from shardwright.backends.launch import launch

HERE = Path(__file__).parent


@pytest.mark.full
def test_two_thousand_steps(tmp_path: Path) -> None:
    assert launch(2, [str(HERE / "mpi_long.py"), str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    print({key: found[key] for key in ("grown", "resynced")}, "drift up to", max(found["drift"]))
    for grown in found["grown"]:
        assert grown["arrays"] == 0
        assert grown["pool_bytes"] == 0
        assert grown["resident_bytes"] < 4 << 20
    assert all(found["equal"]), "the same ranks, plan and seed give the same bits"
    assert found["alike"] == 1
    # One unit a step for a hundred steps, and what the step itself makes of it; then nothing is left.
    assert all(units == 0.0 for units in found["drift"][1::2])
    assert 0 < max(found["drift"]) < 8 * 100
    assert found["resynced"] > 0
