"""Hypothesis profiles: `ci` (the default) and `full` (`make test-full`: ten times the cases).

Golden files: `golden(name, text)` compares a text with `tests/golden/NAME`, `--update-golden` rewrites it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Read by XLA when JAX first asks for a device, also in processes that tests start. What is compiled here runs
# once or twice on tiny arrays: a sixth of the suite would be LLVM optimising it.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("full", parent=settings.get_profile("ci"), max_examples=1000)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from what is printed now"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file that reviewers read."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n")
        assert path.read_text() == text + "\n", "run pytest --update-golden and review the diff"

    return compare
