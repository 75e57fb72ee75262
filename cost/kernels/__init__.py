"""Seconds of kernels on types of devices, from datasheets and fitted constants."""
