"""Collective schedules: what every rank of a plan exchanges in a step, as data that others can run."""
