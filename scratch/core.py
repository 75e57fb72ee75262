exec(open('scratch/direct.py').read().split("# inline layers")[0])
from shardwright.synth.solve import _distinct
from shardwright.synth.dual import *
import shardwright.synth.dual as D
class Dense:
    def __init__(s,t): s.t=np.where(np.isfinite(t),t,1e9); s.rays=[np.zeros((1,n)) for n in t.shape]; s.centre=np.zeros(1)
def marg(f, inc):
    t=f.t; nd=t.ndim
    for p,m in enumerate(inc): t = t + m.reshape([-1 if q==p else 1 for q in range(nd)])
    return [t.min(axis=tuple(q for q in range(nd) if q!=p)) for p in range(nd)]
D._marginals=marg
def bound(self):
    total = sum(self._shade_counts[s] * float(x.min()) for s, x in enumerate(self._sums))
    for k in self.kinds:
        t=k.star.t; nd=t.ndim
        for p,m in enumerate(k.messages): t=t-m.reshape([-1 if q==p else 1 for q in range(nd)])
        total += k.count*float(t.min())
    return total
D.Dual.bound=bound
stage=sv._start; cooked, sizes = rounded(stage.folded, cook(stage.folded, tables)), sv._sizes
const=0
for simple in sv._stages:
    folded=stage.folded; kept=prune(folded,sizes,cooked)
    tape=stage.prepare([len(v) for v in kept.values], simple, 1<<19); el=eliminate(tape,kept); const+=el.constant
    stage=stage.next(tape); cooked=cook(stage.folded,_distinct(el)); before=[folded.class_of[m[0]] for m in stage.folded.classes]; sizes=[kept.size(k) for k in before]
folded=stage.folded; kept=prune(folded,sizes,cooked)
T('stages')
keys={}; tabs=[]; uses=[]
for scope, r in zip(folded.scopes, folded.recipe_of):
    kinds=tuple(folded.class_of[v] for v in scope); key=kept.key(r,kinds)
    if key not in keys: keys[key]=len(keys); tabs.append(Dense(kept.table(r,kinds)))
    uses.append((keys[key],scope))
print('tables', len(tabs), 'cells', sum(x.t.size for x in tabs))
d=Dual(folded.class_of, [kept.size(c) for c in folded.class_of], uses, tabs); T('dual init')
print('kinds', len(d.kinds), 'shades', len(d._sums))
for i in range(int(sys.argv[4])):
    for _ in range(4): d.sweep()
    print(d.sweeps, const+d.bound(), end=' '); T('')
