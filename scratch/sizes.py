import sys
exec(open('scratch/try_grid.py').read().split("t=time.process_time(); d = Dual")[0])
import numpy as np, collections
c = collections.Counter(); cells=0; work=0
for f, s in zip(solver.factors, stars):
    n = np.prod([r.shape[1] for r in s.rays]); cells += n; work += n*len(s.centre)
    c[tuple(sorted(r.shape[1] for r in s.rays))] += 1
print('cells', cells, 'work', work)
for k,v in sorted(c.items(), key=lambda kv: -np.prod(kv[0])*kv[1])[:15]: print(k, v, np.prod(k))
# finite parts
fin = collections.Counter()
deg = collections.Counter(v for u in space.uses for v in u.scope)
print('degree', sorted(collections.Counter(deg.values()).items()))
print('domain sizes', sorted(collections.Counter(len(ch.domain) for ch in space.choices).items()))
