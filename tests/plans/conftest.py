"""Lets the tests of this folder import the modules beside them, and makes the plan that most of them use."""

import sys
from pathlib import Path

import pytest

from shardwright import Plan, synthesize

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def made() -> Plan:
    from plan_cases import fleet, mlp

    step, args = mlp()
    return synthesize(step, *args, fleet=fleet(30, 20, 10))
