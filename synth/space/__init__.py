"""Space: what a step's tensors may be held in, and what that makes necessary: choices and factors."""
