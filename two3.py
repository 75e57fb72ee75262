import sys; sys.argv=["x"]; sys.path.insert(0,"/tmp/s52")
from two import *
p = shardwright.synthesize(train_step,*args,fleet=fleet("1 Gbit/s",(2,3,2)),stages=16,axes=2,devices="all")
print(p); print(p.bound_s, p.search_gap)
print(p.program if not hasattr(p,"program_text") else "")
