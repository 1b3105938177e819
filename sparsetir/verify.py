def verify(f): pass
