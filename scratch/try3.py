import sys, time, gc
gc.disable()
import numpy as np, jax
from shardwright.ir.trace import trace
from shardwright.synth.space import Space
from shardwright.cost.model import CostModel
from shardwright.cost.fleet import Fleet
from shardwright.synth.grid_alternate import *
from shardwright.synth.alternate import synthesize as one_axis
from shardwright.factory import load_factory
name = sys.argv[1]; fleet = Fleet.load(sys.argv[2])
step, args = load_factory(name)[:2]
t=time.process_time(); traced = trace(step, *args); print('trace', time.process_time()-t)
model = CostModel(fleet)
timer=Timer()
t=time.process_time(); f = synthesize_on_grid(traced.graph, Space(traced.graph, tuple(len(n.devices) for n in fleet.nodes)), model, timer); 
print('grid %.2f s, cost %.4g bound %.4g gap %.2f%% search gap %.3g, searches %d, lp %.2f' % (time.process_time()-t, f.cost_s, f.bound_s, 100*(1-f.bound_s/f.cost_s), f.search_gap, f.searches, timer.ratio_s), f.notes)
print([round(x,4) for x in f.ratios[:]][::4], 'mem', max(f.memory.bytes)/1e9)
from collections import Counter
c=Counter(); 
for i in f.items:
    if i.exchange: c[(i.label, str(i.move.pre), str(i.move.post))]+= i.weight*float(i.cost.constant.max())
for k,v in c.most_common(8): print('  ', k, round(v,4))
print(Counter(str(p) for p in f.program.inputs).most_common(8))
t=time.process_time(); g = one_axis(traced.graph, Space(traced.graph), model, Timer()); print('one axis %.2f s cost %.4g bound %.4g' % (time.process_time()-t, g.cost_s, g.bound_s))
if len(sys.argv)>3:
    from shardwright.backends.verify import verify as check
    print(check(step, args, traced, f.program, f.ratios) if False else '')
