"""Benchmarks: `python -m bench`. Each writes JSON with the load of the machine to bench/results/."""
