"""Bytes: what programs keep on each device, and what XLA makes of a segment in between."""
