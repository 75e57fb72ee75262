"""Brute-force conformance of the placement rules."""
