"""Comparing strategies: predictions, crossovers, the command, every way to ask wrongly, real ranks."""

import itertools
import json
import re
import subprocess
import sys
from math import floor, log2
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import Fleet, InputError, compare_collectives
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.backends.measuring.timing import example
from shardwright.cli import main
from shardwright.compare import crossovers, steps, sweep_collectives
from shardwright.cost.model import CostModel
from shardwright.ir import collectives

LAPTOP = str(Path(__file__).parent.parent / "examples" / "fleets" / "laptop.yaml")
EXCHANGES = [kind for kind, c in collectives.registry().items() if not c.local]

SCHEMA = {
    "type": "object",
    "required": ["collective", "fleet", "devices", "ratios", "sizes", "crossovers"],
    "additionalProperties": False,
    "properties": {
        "collective": {"enum": EXCHANGES},
        "fleet": {"type": "string"},
        "devices": {"type": "array", "items": {"type": "string"}},
        "ratios": {"type": "array", "items": {"type": "number"}},
        "sizes": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["nbytes", "fastest", "rows"],
                "additionalProperties": False,
                "properties": {
                    "nbytes": {"type": "integer"},
                    "fastest": {"type": "string"},
                    "rows": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["strategy", "predicted_s", "link_bytes", "measured_s"],
                            "additionalProperties": False,
                            "properties": {
                                "strategy": {"type": "string"},
                                "predicted_s": {"type": "number", "exclusiveMinimum": 0},
                                "link_bytes": {"type": "number", "minimum": 0},
                                "measured_s": {"type": ["number", "null"]},
                            },
                        },
                    },
                },
            },
        },
        "crossovers": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["nbytes", "before", "after"],
                "additionalProperties": False,
                "properties": {
                    "nbytes": {"type": "integer"},
                    "before": {"type": "string"},
                    "after": {"type": "string"},
                },
            },
        },
    },
}


def fleet_of(devices: int, bandwidth: str = "1 GB/s", latency: str = "100 us") -> Fleet:
    device = {"name": "x", "flops": "1 GFLOP/s", "memory_bandwidth": "1 GB/s", "memory": "1 GB"}
    node = {
        "devices": {"type": device, "count": devices},
        "link": {"bandwidth": bandwidth, "latency": latency},
    }
    return Fleet.from_dict({"name": "even", "nodes": [node]})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


@pytest.mark.parametrize("kind", EXCHANGES)
def test_every_strategy_has_a_row_and_the_fastest_comes_first(kind: str) -> None:
    rows = compare_collectives(LAPTOP, kind, 1 << 20, ratios=(0.4, 0.3, 0.2, 0.1))
    move, _ = example(kind, "", 1)
    sensible = CostModel(Fleet.load(LAPTOP)).strategies(kind, move.pre, move.post)
    assert {row.strategy for row in rows} == set(sensible) and len(sensible) > 0
    assert [row.predicted_s for row in rows] == sorted(row.predicted_s for row in rows)
    assert all(row.link_bytes > 0 and row.measured_s is None for row in rows)


def test_rows_are_the_formulas_of_the_ring() -> None:
    rows = {
        row.strategy: row for row in compare_collectives(LAPTOP, "all_gather", 1000, (0.5, 0.3, 0.2, 0.0))
    }
    assert rows["exact"].predicted_s == pytest.approx(3 * 50e-6 + 1000 / 2e9)
    assert rows["exact"].link_bytes == pytest.approx(1000)
    assert rows["padded"].link_bytes == pytest.approx(3 * 500)


def test_text_and_number_are_the_same_size() -> None:
    assert compare_collectives(LAPTOP, "all_reduce", "64 KiB") == compare_collectives(
        Fleet.load(LAPTOP), "all_reduce", 64 << 10
    )


@given(
    devices=st.integers(3, 24),
    latency_us=st.integers(1, 500),
    mbyte_per_s=st.integers(50, 20_000),
)
@settings(max_examples=30)
def test_crossover_is_where_the_closed_form_says(devices: int, latency_us: int, mbyte_per_s: int) -> None:
    """2 (m-1) (a + N / (m w)) = r (a + N / w), solved for N; r rounds double, two more fold an odd rest."""
    fleet = fleet_of(devices, f"{mbyte_per_s} MB/s", f"{latency_us} us")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives.AllReduce, "strategies", ("ring", "tree"))
        found = crossovers(fleet, "all_reduce", 1, 1 << 34)
    m, rounds = devices, floor(log2(devices)) + (0 if log2(devices).is_integer() else 2)
    aw, slope = latency_us * mbyte_per_s, rounds - 2 * (m - 1) / m
    if slope <= 0 or aw * (2 * (m - 1) - rounds) / slope < 1:
        assert not found
        return
    exact = aw * (2 * (m - 1) - rounds) / slope
    (crossover,) = found
    assert (crossover.before, crossover.after) == ("tree", "ring")
    assert abs(crossover.nbytes - (floor(exact) + 1)) <= 1 + 1e-9 * exact


@pytest.mark.parametrize("kind", EXCHANGES)
def test_each_crossover_is_one_to_the_byte(kind: str) -> None:
    fleet, shares = Fleet.load(LAPTOP), (0.4, 0.3, 0.2, 0.1)
    for crossover in crossovers(fleet, kind, 16, 1 << 30, shares):
        times = [
            {row.strategy: row.predicted_s for row in compare_collectives(fleet, kind, nbytes, shares)}
            for nbytes in (crossover.nbytes - 1, crossover.nbytes)
        ]
        assert times[0][crossover.before] == min(times[0].values())
        assert times[1][crossover.after] == min(times[1].values())


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_strategies_that_are_predicted_alike_do_not_cross(kind: str) -> None:
    """At even shares blocks as long as the largest share are exact; rounding makes neither the faster one."""
    assert crossovers(LAPTOP, kind, 1 << 10, 1 << 30) == ()
    rows = sweep_collectives(LAPTOP, kind, steps(1 << 10, 1 << 30, 1))
    assert {swept[0].strategy for swept in rows} == {rows[0][0].strategy}


def test_steps_are_even_in_octaves_and_hold_both_ends() -> None:
    assert steps(1024, 16384, 1) == [1024, 2048, 4096, 8192, 16384]
    assert steps(1000, 5000, 0.5)[0] == 1000 and steps(1000, 5000, 0.5)[-1] == 5000
    assert all(a < b for a, b in itertools.pairwise(steps(1, 100, 8)))


def test_the_command_shows_winner_and_crossovers() -> None:
    result = run("all_reduce", "--fleet", LAPTOP, "--sweep", "1KiB:64MiB")
    assert result.exit_code == 0, result.output
    change = crossovers(Fleet.load(LAPTOP), "all_reduce", 1 << 10, 64 << 20)[0]
    assert f"from {change.nbytes:,} bytes on {change.after} instead of {change.before}" in result.output
    one = run("all_reduce", "--fleet", LAPTOP, "--bytes", "64MiB")
    fastest = compare_collectives(LAPTOP, "all_reduce")[0]
    first = next(line for line in one.output.splitlines() if line.startswith(fastest.strategy))
    assert "1.00 ×" in first


@pytest.mark.parametrize("arguments", [(), ("--sweep", "1KiB:1MiB"), ("--ratios", "0.5,0.25,0.25,0")])
def test_json_has_its_form(arguments: tuple[str, ...]) -> None:
    result = run("all_gather", "--fleet", LAPTOP, "--json", *arguments)
    assert result.exit_code == 0, result.output
    jsonschema.validate(json.loads(result.output), SCHEMA)


def test_the_picture_is_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / name for name in ("a.svg", "b.svg")]
    for picture in pictures:
        sweep = ("--sweep", "1KiB:64KiB", "--plot", str(picture))
        assert run("all_gather", "--fleet", LAPTOP, *sweep).exit_code == 0
    assert pictures[0].read_text() == pictures[1].read_text()
    assert "<svg" in pictures[0].read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"a.svg", "b.svg"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"nbytes": None}, "bytes: None is no number of bytes"),
        ({"nbytes": 1e6}, "bytes: 1000000.0 is no number of bytes"),
        ({"nbytes": 0}, "bytes: 0 is out of range"),
        ({"ratios": "abcd"}, "ratios: is 'abcd'. Pass a list"),
        ({"ratios": 5}, "ratios: is 5. Pass a list"),
        ({"ratios": [0.5, "half", 0, 0]}, "ratios: 'half' is no number"),
    ],
)
def test_scripts_are_told_as_clearly(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        compare_collectives(LAPTOP, "all_gather", **asked)


def test_sizes_that_are_none() -> None:
    for low in (0, -4):
        with pytest.raises(InputError, match=f"bytes: {low} is out of range"):
            crossovers(LAPTOP, "all_gather", low, 100)
    assert crossovers(LAPTOP, "all_gather", "1 KiB", "1 MiB") == crossovers(
        LAPTOP, "all_gather", 1024, 1 << 20
    )
    assert sweep_collectives(LAPTOP, "all_gather", (), measure=True) == ()
    with pytest.raises(InputError, match="sizes: is 5"):
        sweep_collectives(LAPTOP, "all_gather", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_gathr",), "is no collective. Did you mean all_gather?"),
        (("slice",), "sends nothing"),
        (("all_gather", "--bytes", "64"), "'64' has no unit"),
        (("all_gather", "--bytes", "64 Mb"), "'Mb' is not a unit of memory size"),
        (("all_gather", "--bytes", "9 PB"), "is out of range"),
        (("all_gather", "--bytes", "1kB", "--sweep", "1kB:2kB"), "Pass one of them"),
        (("all_gather", "--sweep", "1KiB"), "is no range"),
        (("all_gather", "--sweep", "2KiB:1KiB"), "is empty"),
        (("all_gather", "--sweep", "1KiB:1024B"), "is a single size"),
        (("all_gather", "--ratios", "0.5,0.5"), "are 2, but laptop has 4 devices"),
        (("all_gather", "--ratios", "0.5,0.3,0.1,0.2"), "sum to 1.1"),
        (("all_gather", "--ratios", "0.5,0.7,-0.1,-0.1"), "not all between 0 and 1"),
        (("all_gather", "--ratios", "half"), "is no list of numbers"),
        (("all_gather", "--plot", "picture.doc"), "is no picture's name"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, "--fleet", LAPTOP)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_nodes_without_a_network_are_refused(tmp_path: Path) -> None:
    fleet = tmp_path / "two.yaml"
    fleet.write_text("name: two\nnodes: [{devices: {type: T4}}, {devices: {type: T4}}]\n")
    result = run("all_gather", "--fleet", str(fleet))
    assert result.exit_code == 2 and "lacks the key 'network'" in result.stderr


def test_one_device_has_nothing_to_exchange() -> None:
    with pytest.raises(InputError, match="has one device"):
        compare_collectives(
            Fleet.from_dict({"name": "solo", "nodes": [{"devices": {"type": "T4"}}]}), "all_gather"
        )


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="too many for the"):
        compare_collectives(fleet_of(4000), "all_gather", 1024, measure=True)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("all_gather", "--fleet", LAPTOP, "--plot", "a.svg")
    assert result.exit_code == 2 and "pip install 'shardwright[plot]'" in result.stderr


def test_real_ranks_are_timed() -> None:
    sizes = (1 << 10, 1 << 16)
    swept = sweep_collectives(fleet_of(2), "all_to_all", sizes, (0.75, 0.25), measure=True)
    assert all(row.measured_s is not None and row.measured_s > 0 for rows in swept for row in rows)


def test_a_job_of_another_size_is_refused() -> None:
    """Two ranks, a fleet of four: the error of every rank is the same, and one is enough."""
    command = ["-m", "shardwright", "compare", "all_gather", "--fleet", LAPTOP, "--bytes", "1kB", "--measure"]
    done = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, *command],
        env=rank_environment(2),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("laptop has 4 devices, but 2 MPI ranks are running") == 1
