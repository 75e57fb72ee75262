"""Meaning: placements, the graph of a training step, sharding rules, collectives and programs."""
