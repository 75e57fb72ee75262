"""Checkpoints: what is saved of a leaf, what is refused, and that an error on one rank is one on all."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import pytest

import shardwright
from shardwright import InputError, PlanError, checkpoints
from shardwright.backends.launch import find_mpiexec, rank_environment

HERE = Path(__file__).parent

FITS: list[Any] = [
    np.arange(3),
    np.arange(6.0).reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.int64(-7),
    np.float64(0.1),
    np.array([2**32 - 1], np.uint64),
    np.array([[1 + 2j]]),
    np.array([1.0, np.inf, -np.inf, np.nan]),
    np.array([True, False]),
    np.array([[1.5, 2.5]], jnp.bfloat16),
    np.zeros((0, 3)),
    2**31 - 1,
    -(2**31),
    0.1,
    1.5 - 2j,
    True,
    jnp.arange(4, dtype="uint8"),
]


@pytest.mark.parametrize("leaf", FITS, ids=lambda leaf: f"{type(leaf).__name__}-{leaf!r}".replace("\n", ""))
def test_a_leaf_comes_back_as_jax_holds_it(leaf: Any, tmp_path: Path) -> None:
    shardwright.save(tmp_path / "1", {"x": leaf})
    wanted = jnp.asarray(leaf)
    for like in (leaf, wanted, jax.ShapeDtypeStruct(wanted.shape, wanted.dtype)):
        got = shardwright.restore(tmp_path / "1", {"x": like})["x"]
        assert isinstance(got, jax.Array) and got.dtype == wanted.dtype and got.shape == wanted.shape
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()


REFUSED: list[tuple[Any, str]] = [
    (5_000_000_000, "holds 5000000000, which is beyond int32"),
    (-(2**31) - 1, "holds -2147483649, which is beyond int32"),
    (2**70, ".*which is beyond int32"),
    (np.int64(2**40), ".*which is beyond int32"),
    (np.array([0, -(2**40)]), "holds -1099511627776, which is beyond int32"),
    (np.array([2**40], np.uint64), ".*which is beyond uint32"),
    (1e300, "holds 1e\\+300, which is beyond float32"),
    (np.array([1.0, -1e300]), "holds -1e\\+300, which is beyond float32"),
    (np.array([1 + 1e300j]), ".*which is beyond complex64"),
    (np.array("2024-01-01", "M8[s]"), "has the dtype datetime64\\[s\\], which JAX has not"),
    (np.zeros(2, ">f4"), "has the dtype >f4, which JAX has not"),
    (np.zeros(2, [("a", "f4")]), "has the dtype .*, which JAX has not"),
    (np.array(["text"]), "has the dtype <U4, which JAX has not"),
    (jax.ShapeDtypeStruct((2,), "float32"), "is a shape without values"),
]


@pytest.mark.parametrize(("leaf", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_a_leaf_that_jax_does_not_hold_is_refused(leaf: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"leaf \\['x'\\]: {reason}"):
        shardwright.save(tmp_path / "1", {"w": jnp.ones(2), "x": leaf})
    assert not list(tmp_path.iterdir())


def test_a_leaf_of_64_bits_made_where_jax_has_them(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        small, large = jnp.arange(3), jnp.asarray(2**40)
        shardwright.save(tmp_path / "1", {"x": large, "y": 5_000_000_000})
        got = shardwright.restore(tmp_path / "1", {"x": large, "y": 0})
        assert int(got["x"]) == 2**40 and int(got["y"]) == 5_000_000_000
    assert small.dtype == large.dtype == "int64"
    shardwright.save(tmp_path / "2", {"x": small})
    assert shardwright.restore(tmp_path / "2", {"x": np.zeros(3, int)})["x"].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="holds 1099511627776"):
        shardwright.save(tmp_path / "3", {"x": large})


def test_donated_state_is_refused(tmp_path: Path) -> None:
    given = jnp.ones(4)
    given.delete()
    with pytest.raises(InputError, match=r"leaf \['x'\]: was passed to a step that took its memory"):
        shardwright.save(tmp_path / "1", {"x": given})


def test_a_piece_of_another_size_is_damage(tmp_path: Path) -> None:
    shardwright.save(tmp_path / "1", {"x": jnp.arange(4)})
    manifest = tmp_path / "1" / checkpoints.MANIFEST
    content = json.loads(manifest.read_text())["content"]
    content["leaves"]["['x']"]["shape"] = content["pieces"][0]["shape"] = [3]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({"content": content, "sha256": digest}))
    with pytest.raises(PlanError, match=r"\['x'\] has 16 bytes, not 12 for \[3\] of int32"):
        shardwright.restore(tmp_path / "1", {"x": jnp.arange(3)})


# What orbax passes on of a full disk is none of Python's errors for it.
FULL = ValueError(
    f'RESOURCE_EXHAUSTED: Error writing "p0/0" in "/{"long/" * 200}": No space left on device\nSource: …'
)


def test_a_disk_that_is_full_for_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Any, folder: Path, arrays: Any) -> None:
        (folder / "d").mkdir(parents=True)
        raise FULL

    monkeypatch.setattr(orbax.PyTreeCheckpointer, "save", save)
    with pytest.raises(
        PlanError, match=r"cannot be written: ValueError: RESOURCE_.{,400} left on device\. Choose"
    ):
        shardwright.save(tmp_path / "1", {"x": jnp.arange(4)})
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_for_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", write_text)
        with pytest.raises(PlanError, match="cannot be written: No space left"):
            shardwright.save(tmp_path / "1", {"x": jnp.arange(4)})
    assert not list(tmp_path.iterdir())
    shardwright.save(tmp_path / "1", {"x": jnp.arange(4)})


def test_a_checkpoint_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shardwright.save(tmp_path / "1", {"x": jnp.arange(4)})

    def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(PlanError, match="cannot be read: Permission denied"):
        shardwright.restore(tmp_path / "1", {"x": jnp.arange(4)})


def test_the_latest_checkpoint(tmp_path: Path) -> None:
    assert shardwright.latest(tmp_path / "none") is None and shardwright.latest(tmp_path) is None
    for name in ("9", "10"):
        shardwright.save(tmp_path / name, {"x": 1})
    (tmp_path / "11").mkdir()
    (tmp_path / "12").write_text("a file")
    for name in ("²", "٣", "13a", "-14"):  # digits to some, but no names of ours
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoints.MANIFEST).write_text("{}")
    assert shardwright.latest(tmp_path) == tmp_path / "10"


def test_a_folder_that_cannot_be_read_is_not_one_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="file: cannot be read for checkpoints: Not a directory"):
        shardwright.latest(tmp_path / "file")
    shardwright.save(tmp_path / "1", {"x": 1})
    denied = PermissionError(errno.EACCES, "Permission denied")

    # Whoever runs the tests may be root, who may read everything.
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise denied

    for name in ("iterdir", "stat"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, name, refused)
            with pytest.raises(InputError, match="cannot be read for checkpoints: Permission denied"):
                shardwright.latest(tmp_path)


def test_an_error_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    done = subprocess.run(
        [find_mpiexec(), "-n", "3", sys.executable, str(HERE / "checkpoint_checks.py"), str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300, env=rank_environment(3),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "summary.json").read_text()) == []
