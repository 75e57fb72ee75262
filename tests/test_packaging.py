"""The package as users get it: built, installed where nothing else is, with and without MPI."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PLANS_WITHOUT_MPI = """
import sys
import jax.numpy as jnp
import shardwright

def step(w, x):
    return w - (x @ w).sum(), x.sum()

step = shardwright.parallelize(step, fleet="fleet.yaml", backend=sys.argv[1])
plan = step.plan(jnp.ones((8, 8)), jnp.ones((8, 8)))
print(len(plan.ratios), shardwright.__version__)
step(jnp.ones((8, 8)), jnp.ones((8, 8)))
"""

FLEET = """
name: two
nodes:
  - devices:
      - {type: {name: slow, flops: 50 MFLOP/s, memory_bandwidth: 100 MB/s, memory: 1 GB}, count: 2}
    link: {bandwidth: 400 GB/s, latency: 100 ns}
"""


def run(*command: str, folder: Path, status: int = 0) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    environment = folder / "build"
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "build", folder=folder)
    run(python, "-m", "build", "--outdir", str(folder), str(ROOT), folder=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def modules() -> set[str]:
    """Every file of the package, by its path in it."""
    folders = {f"{name}/": ROOT / name for name in ("ir", "synth", "cost", "backends")}
    found = {
        prefix + str(path.relative_to(folder))
        for prefix, folder in folders.items()
        for path in folder.rglob("*.py")
    }
    package = ROOT / "src" / "shardwright"
    own = (p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return found | {str(path.relative_to(package)) for path in own if path.suffix != ".pyc"}


@pytest.mark.full
def test_wheel_and_sdist_hold_everything(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as file:
        names = {name.removeprefix("shardwright/") for name in file.namelist()}
    assert modules() <= names
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/shardwright/{name}" for name in modules()} <= held
    assert {"LICENSE", "README.md", "pyproject.toml"} <= held


@pytest.mark.full
@pytest.mark.parametrize("extra", ["", "[mpi]"])
def test_a_fresh_environment_plans_without_mpi_and_names_what_is_missing(
    built: tuple[Path, Path], extra: str, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", f"{built[1]}{extra}", folder=tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "step.py").write_text(PLANS_WITHOUT_MPI)
    assert "2 0." in run(python, "step.py", "reference", folder=tmp_path)
    assert run(python, "-m", "shardwright", "--version", folder=tmp_path).startswith(
        "shardwright, version 0."
    )
    launcher = tmp_path / "venv" / "bin" / "mpiexec"
    if extra:
        told = run(str(launcher), "-n", "2", python, "step.py", "auto", folder=tmp_path)
        assert told.count("2 0.") == 2
    else:
        assert not launcher.exists()
        told = run(python, "step.py", "mpi", folder=tmp_path, status=1)
        assert "pip install 'shardwright[mpi]'" in told


def test_the_version_stands_in_one_place() -> None:
    version = next(
        line.split('"')[1]
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if line.startswith("version")
    )
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"shardwright, version {version}\n"
    sources = [p for p in ROOT.joinpath("src", "shardwright").rglob("*.py") if p.name != "__init__.py"]
    assert not [p for p in sources if f'"{version}"' in p.read_text()]
    import shardwright

    assert shardwright.__version__ == version
