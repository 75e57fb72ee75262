"""Shares: how much of every sharded axis each device gets, and programs and shares in turns."""
