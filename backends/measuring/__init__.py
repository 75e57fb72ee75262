"""Measuring what plans are priced by: kernels, pieces of steps and exchanges on MPI ranks."""
