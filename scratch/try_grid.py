import sys, time, gc
gc.disable()
import numpy as np, jax
from shardwright.ir.trace import trace
from shardwright.synth.space import Space
from shardwright.cost.model import CostModel
from shardwright.cost.fleet import Fleet
from shardwright.cost.grid import GridModel
from shardwright.synth.grid_pricing import *
from shardwright.synth.grid_solve import GridSolver
from shardwright.synth.dual import Dual
from shardwright.factory import load_factory
name = sys.argv[1]; fleet = Fleet.load(sys.argv[2])
step, args = load_factory(name)[:2]
t=time.process_time(); traced = trace(step, *args); print('trace', time.process_time()-t)
model = CostModel(fleet); g = GridModel(model)
t=time.process_time(); space = Space(traced.graph, g.mesh.nodes); print('space', time.process_time()-t, len(space.choices), len(space.uses), max(len(c.domain) for c in space.choices))
solver = GridSolver(space); print('factors', len(solver.factors))
listed = GridPriceList(g)
t=time.process_time(); floors = grid_floors(listed); stars = floors.stars(solver.factors); print('price', time.process_time()-t, 'lines', len(listed), 'cells', sum(r.size for s in stars for r in s.rays), max(len(s.centre) for s in stars))
t=time.process_time(); d = Dual(solver._domains, solver._sizes, solver._uses, stars); print('dual', time.process_time()-t, len(d.kinds), len(d._sums))
for k in range(12):
    t=time.process_time()
    for _ in range(4): d.sweep()
    print(d.sweeps, d.bound(), time.process_time()-t)
t=time.process_time(); s = solver.solve(floors); print('solve', time.process_time()-t, s.seconds, s.bound_s, s.width, s.expanded)
even = g.mesh.ratios(*g.mesh.even())
p = grid_prices(listed, even)
t=time.process_time(); s2 = solver.solve(p); print('solve even', time.process_time()-t, s2.seconds, s2.bound_s, s2.width, s2.expanded)
