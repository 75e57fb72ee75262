"""Where fleets come from: what is found on machines, what other tools say, what was measured."""
