"""One process per device, over MPI."""
