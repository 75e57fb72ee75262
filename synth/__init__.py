"""Synthesis: from a graph and a fleet to the program, the shares and a certified lower bound."""
