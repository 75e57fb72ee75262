"""Layers that a step repeats, found by structure, and the step written again with scans over them."""
