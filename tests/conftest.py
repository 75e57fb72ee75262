"""Hypothesis profiles: `ci` (the default) and `full` (`make test-full`: ten times the cases).

Golden files: `golden(name, text)` compares a text with `tests/golden/NAME`, `--update-golden` rewrites it.
"""

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings
from jax._src.interpreters import mlir

# What tests share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

# Read by XLA when JAX first asks for a device, also in processes that tests start. What is compiled here runs
# once or twice on tiny arrays: a sixth of the suite would be LLVM optimising it, and the emitters of fused
# loops take as long as all the rest of a compilation (later versions of XLA have no others).
_QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_QUICK]).strip()

# JAX makes a context of MLIR for every function that it lowers, which takes as long as to lower a small one.
if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# Where nothing compiled is to be written, every process that a test starts compiles all of our modules first:
# two thirds of a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

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
