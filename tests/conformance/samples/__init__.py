"""Small programs for every primitive that has a rule: what the conformance test runs.

A sample is a function of a `Draw` and gives a program and its arguments. It is called with two draws, whose
sizes differ, so that no combination passes by a coincidence of sizes. To add a primitive, add a rule and
a sample; the test fails for a rule without one.
"""

from tests.conformance.samples import contraction, elementwise, indexing, linalg, movement, random, reduction
from tests.conformance.samples.draw import ABSENT, SAMPLES, Draw, Sample

__all__ = [
    "ABSENT",
    "SAMPLES",
    "Draw",
    "Sample",
    "contraction",
    "elementwise",
    "indexing",
    "linalg",
    "movement",
    "random",
    "reduction",
]
