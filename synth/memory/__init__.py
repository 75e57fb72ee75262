"""Memory: programs within the devices' budgets, and what none of them can be cheaper than."""
