"""Execution: the reference interpreter, one process per device over MPI, and exported schedules."""
