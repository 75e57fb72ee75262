"""One jitted program for all devices."""
