"""Shardwright: a distributed program for unequal devices, from a single-device JAX training step."""
