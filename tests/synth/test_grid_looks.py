"""On two mesh axes, what is looked at as it will run although the model of memory has it far too large."""

from collections.abc import Sequence
from dataclasses import replace

import grid_cases
import pytest
from test_grid_memory import fleet

from shardwright.cost.grid.model import GridModel
from shardwright.cost.memory.liveness import peaks_by_device
from shardwright.cost.model import CostModel
from shardwright.ir.program import Program
from shardwright.synth.grid.candidate import GridCandidate
from shardwright.synth.grid.pricing import GridPriceList, grid_floors
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.grid.weighing import Weighing
from shardwright.synth.programs.judge import Judge
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


@pytest.mark.parametrize(
    ("compiler", "part", "seen"), [("gpu", 0.7, True), ("cpu", 0.7, False), ("gpu", 0.6, False)]
)
def test_on_cards_more_is_looked_at(compiler: str, part: float, seen: bool) -> None:
    """XLA computes again what a program for cards need not keep: there the model may be far off."""
    graph = replace(grid_cases.graph(), compiler=compiler, memo={})
    space = Space(graph, (2, 2))

    def weighed(memory_bytes: float) -> tuple[Weighing, GridCandidate, list[Program]]:
        listed = GridPriceList(GridModel(CostModel(fleet(memory_bytes))))
        looked: list[Program] = []

        def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
            looked.append(program)
            return (int(memory_bytes),) * len(ratios)

        weighing = Weighing(graph, space, listed.grid, Judge(graph, listed.model, look), Timer())
        floors, mesh = grid_floors(listed), listed.grid.mesh
        found = weighing.candidate(GridSolver(space).solve(floors), floors, mesh.ratios(*mesh.even()))
        return weighing, found, looked

    _, roomy, _ = weighed(1 << 30)
    most = max(peaks_by_device(roomy.program, graph, roomy.ratios).bytes)
    weighing, found, looked = weighed(part * most)
    assert found.over == pytest.approx(1 / part, rel=1e-3)
    here = weighing.looked_at(found, briefly=True)
    assert (here.fits, looked) == (seen, [found.program] if seen else [])
