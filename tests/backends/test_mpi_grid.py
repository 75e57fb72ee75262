"""Exchanges across and within nodes of unequal size, on real ranks: nodes of 1 + 3 and of 2 + 3 devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from steps import STEPS

from shardwright import Fleet, synthesize
from shardwright.backends.launch import launch
from shardwright.ir.placement import Grid
from shardwright.ir.program import placements

HERE = Path(__file__).parent


def fleet(*nodes: tuple[int, int]) -> Fleet:
    """Nodes of so many devices of so many MFLOP/s."""

    def node(count: int, speed: int) -> dict[str, object]:
        kind = {"name": f"d{speed}", "flops": f"{speed} MFLOP/s", "memory_bandwidth": f"{2 * speed} MB/s"}
        link = {"link": {"bandwidth": "4 GB/s", "latency": "1 us"}} if count > 1 else {}
        return {"devices": {"type": kind | {"memory": "1 GB"}, "count": count}, **link}

    network = {"bandwidth": "10 MB/s", "latency": "1 ms"}
    return Fleet.from_dict({"name": "mesh", "nodes": [node(*n) for n in nodes], "network": network})


@pytest.mark.parametrize("nodes", [((1, 30), (3, 10)), ((2, 20), (3, 10))], ids=["1 + 3", "2 + 3"])
def test_ranks_conform_on_two_axes(nodes: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    step, args = STEPS["mlp"]()
    plan = synthesize(step, *args, fleet=fleet(*nodes), axes=2, devices="all")
    assert plan.axes == 2 and any(isinstance(p, Grid) for p in placements(plan.program))
    plan.save(tmp_path / "plan.json")
    ranks = sum(count for count, _ in nodes)
    script = [str(HERE / "mpi_grid.py"), str(tmp_path / "plan.json"), str(tmp_path / "summary.json")]
    assert launch(ranks, script) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failures"] == []
    assert summary["checked"] > 100 * ranks
