"""Search: the best program of a space at one set of prices, and what none can be cheaper than."""
