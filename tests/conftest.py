"""Hypothesis profiles: `ci` (the default) and `full` (`make test-full`: ten times the cases)."""

from hypothesis import settings

settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("full", parent=settings.get_profile("ci"), max_examples=1000)
settings.load_profile("ci")
