"""Ranks and what they run on: a part of the cores, a card each, and a warning if it is not as planned."""

import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import shardwright.fleets.occupants as occupants
from shardwright.backends.cards import card_variables, cards
from shardwright.backends.measuring.job import on_cards
from shardwright.backends.pin import cores_of
from shardwright.backends.pin import main as pin
from shardwright.fleets.inventory import Seen
from shardwright.fleets.occupants import other_card, warn_of_other_card
from shardwright.ir.errors import OtherDeviceWarning
from shardwright.ir.wiring import Seats


def test_ranks_share_out_the_cores() -> None:
    assert [cores_of(rank, 2, [0, 1, 2, 3]) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [cores_of(rank, 4, [5, 7]) for rank in range(4)] == [[5], [7], [5], [7]]
    assert [cores_of(rank, 3, [0, 1]) for rank in range(3)] == [[0, 1]] * 3


def test_every_rank_opens_a_card_of_its_own(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert cards({}, tmp_path) == ("0", "1")
    assert cards({"JAX_PLATFORMS": "cpu"}, tmp_path) == () == cards({}, tmp_path / "none")
    assert cards({"CUDA_VISIBLE_DEVICES": "3,GPU-ab"}, tmp_path) == ("3", "GPU-ab")
    assert (
        cards({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == () == cards({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)
    )
    assert cards({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, tmp_path) == ("1",)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert card_variables(1, 2, {}, tmp_path) == {"CUDA_VISIBLE_DEVICES": "1", **order}
    assert card_variables(1, 2, {"CUDA_VISIBLE_DEVICES": "3,5"}, tmp_path) == {"CUDA_VISIBLE_DEVICES": "5"}
    shared = {"CUDA_VISIBLE_DEVICES": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.375", **order}
    assert card_variables(3, 4, {}, tmp_path) == shared
    given = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
    assert card_variables(2, 4, given, tmp_path) == {"CUDA_VISIBLE_DEVICES": "0", **order}
    assert card_variables(0, 2, {}, tmp_path / "none") == {}


def test_a_rank_is_pinned_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda process, cores: None)
    monkeypatch.setattr("os.execve", lambda *command: started.append(command))
    own = SimpleNamespace(card_variables=lambda rank, ranks, environment: {"CARD": f"{rank} of {ranks}"})
    monkeypatch.setattr("shardwright.backends.pin._beside", lambda name: own)
    pin(["2", "python", "-c", "pass"], {"MPI_LOCALRANKID": "1", "A": "b"})
    assert started == [
        ("python", ["python", "-c", "pass"], {"MPI_LOCALRANKID": "1", "A": "b", "CARD": "1 of 2"})
    ]


def test_a_rank_on_another_card_than_planned_is_told() -> None:
    types = ("A100-PCIE-40GB", "T4", "NVIDIA A100-PCIE-40GB-measured-2", "cpu-measured")
    a100, t4 = Seen("NVIDIA A100-PCIE-40GB"), Seen("Tesla T4")
    every, some = Seats((0, 1, 2, 3), 4), Seats((1, 2), 4)
    assert other_card(0, 4, types, every, a100) is None is other_card(2, 4, types, every, a100)
    assert other_card(1, 2, types, some, a100) is None is other_card(0, 2, types, some, t4)
    said = other_card(0, 2, types, some, a100)
    assert said is not None
    assert said.startswith("rank 0 is device 1 of the plan (T4), but runs on A100-PCIE-40GB, for which")
    # Of what the catalogue does not know nothing is said, nor where ranks are not devices.
    assert other_card(0, 4, types, every, Seen("cpu")) is None is other_card(3, 4, types, every, t4)
    assert other_card(0, 3, types, every, t4) is None


def test_ranks_of_a_job_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2; outside of a job there is nothing to warn of."""
    job = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=1, size=2))
    monkeypatch.setattr("shardwright.backends.mpi.link.mpi", lambda: job)
    monkeypatch.setattr(occupants, "of_jax", lambda devices: (Seen("Tesla T4"),))
    types, seats = ("T4", "A100-PCIE-40GB"), Seats((0, 1), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_card(types, seats)
    monkeypatch.setattr(occupants, "under_mpi", lambda: True)
    with pytest.warns(
        OtherDeviceWarning, match=r"is device 1 of the plan \(A100-PCIE-40GB\), but runs on T4"
    ):
        warn_of_other_card(types, seats)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_card(("T4", "T4"), seats)


def test_jax_without_cuda_computes_on_the_host_beside_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.backends.measuring.job.cards", lambda: ("0",))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not on_cards()
    told = subprocess.CompletedProcess([], 0, stdout="gpu\n")
    monkeypatch.setattr("subprocess.run", lambda *command, **options: told)
    assert on_cards()
    monkeypatch.setattr("shardwright.backends.measuring.job.cards", lambda: ())
    assert not on_cards()
