"""Prices: from the instructions a space may contain to tables of seconds."""
