"""From measurements to the figures of a fleet: rates of devices, latency and bandwidth of links."""
