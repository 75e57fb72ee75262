"""Changed steps that compute the same: in pieces of the batch, with less kept, or kept on the host."""
