"""Prices on two mesh axes: nodes, and the devices of each."""
