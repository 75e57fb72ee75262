"""Prices: fleets of unequal devices, what computing and exchanging costs on them, and memory."""
