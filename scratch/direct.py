exec(open('scratch/try_grid.py').read().split("t=time.process_time(); d = Dual")[0])
from shardwright.synth.solve import *
from shardwright.synth.solve import _Stage
import shardwright.synth.prune as pr
def T(what):
    global t; print('%-20s %.2f' % (what, time.process_time()-t)); t=time.process_time()
t=time.process_time()
full=[np.arange(1)]
tables=[s.table([np.arange(r.shape[1]) for r in s.rays]) for s in stars]; T('tables')
even = g.mesh.ratios(*g.mesh.even())
stages = ((3,1<<16),(4,1<<17)) if len(sys.argv)<4 else eval(sys.argv[3])
sv = Solver(solver._domains, solver._sizes, solver._uses, 1<<23, stages); T('fold')
# inline layers with timing
stage=sv._start; cooked, sizes = rounded(stage.folded, cook(stage.folded, tables)), sv._sizes
T('cook')
layers=[]
for simple in (*sv._stages, None):
    folded=stage.folded
    print('choices', sum(1 for _ in folded.class_of), 'classes', len(folded.classes), 'terms', len(folded.scopes), 'recipes', len(folded.recipes))
    kept=prune(folded,sizes,cooked); T('prune')
    import collections
    print('  sizes before', sorted(collections.Counter(sizes).items()), '\n  after', sorted(collections.Counter(len(v) for v in kept.values).items()), 'open choices', sum(1 for c in folded.class_of if len(kept.values[c])>1))
    tape=stage.prepare([len(v) for v in kept.values], simple, 1<<19); T('order')
    el=eliminate(tape,kept); T('eliminate'); print('  buckets', len(tape.buckets), 'width', tape.width, 'const', el.constant, 'largest', max([a.size for a in el.left] or [0]))
    if simple is None: break
    stage=stage.next(tape); T('next')
    from shardwright.synth.solve import _distinct
    cooked=cook(stage.folded,_distinct(el)); before=[folded.class_of[m[0]] for m in stage.folded.classes]; sizes=[kept.size(k) for k in before]
