"""stub"""
def vtrain_fit(*a): return {}, []
def sailor_rows(*a): return []
