exec(open('scratch/try_grid.py').read().split("t=time.process_time(); floors")[0])
import shardwright.synth.grid_solve as gs
orig=gs._Rest.solve
def r(self, above, stop):
    t=time.process_time(); f=orig(self,above,stop); print('   above %.5f kept'%above, sum((e<=above).sum() for e in self.excess), 'of', sum(len(w) for w in self.excess), 't %.2f'%(time.process_time()-t), f and (f.seconds, f.bound_s, f.expanded, f.width)); return f
gs._Rest.solve=r
ri=gs.Dual.rise
def rise(self,*a):
    t=time.process_time(); x=ri(self,*a); print('   sweeps', self.sweeps, len(self.kinds), x, 't %.2f'%(time.process_time()-t)); return x
gs.Dual.rise=rise
t=time.process_time(); floors = grid_floors(listed); s = solver.solve(floors); print('solve floors', time.process_time()-t, s.seconds, s.bound_s, s.width, s.expanded)
even = g.mesh.ratios(*g.mesh.even())
p = grid_prices(listed, even)
t=time.process_time(); s2 = solver.solve(p); print('solve even', time.process_time()-t, s2.seconds, s2.bound_s, s2.width, s2.expanded)
