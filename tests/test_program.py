"""Programs: the verifier's table of contracts, the text form, JSON."""

import json
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from shardwright.ir.errors import ProgramError
from shardwright.ir.placement import Partial, R, Shard, parse_placement
from shardwright.ir.program import Compute, Move, Program, Property, covers, verify
from shardwright.ir.rules import Signature
from shardwright.ir.serialize import program_from_json, program_to_json
from shardwright.ir.text import format_program, parse_program
from shardwright.ir.trace import trace

Golden = Callable[[str, str], None]


def contraction(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x @ w).sum() * 2.0


CONTRACTION = trace(contraction, jnp.ones((7, 4)), jnp.ones((4, 5))).graph
DATA_PARALLEL = """
program {
  in   0 %0 S(0)
  in   1 %1 R
  0: %1 S(1) = slice %1 R
  1: %1 R = all_gather.padded %1 S(1)
  2: %2 S(0) = dot_general#0(%0 S(0), %1 R)
  3: %3 P(sum) = reduce_sum#1(%2 S(0))
  4: %3 R = all_reduce.ring %3 P(sum)
  5: %4 R = mul#2(%3 R, 2.0 R)
  out  0 %4 R
}
"""


def looped(x: jax.Array, ws: jax.Array) -> tuple[jax.Array, jax.Array]:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = h @ w
        return h, h.sum()

    return jax.lax.scan(layer, x, ws)


LOOPED = trace(looped, jnp.ones((6, 4)), jnp.ones((3, 4, 4)), state={}).graph
LOOP = """
program {
  in   0 %0 S(0)
  in   1 %1 R
  0: %1 R = broadcast.tree %1 R from 0
  1: %1 R = send.direct %1 R from 1 on {1,2}
  2: %1 S(2:2) = slice %1 R on {0,1}
  3: %1 R = all_gather.exact %1 S(2:2) on {0,1}
  4: %2 S(0), %3 R = scan#0(%0 S(0), %1 R) {
    program {
      in   0 %0 S(0)
      in   1 %1 R
      0: %2 S(0) = dot_general#0(%0 S(0), %1 R)
      1: %3 P(sum) = reduce_sum#1(%2 S(0))
      2: %3 R = all_reduce.tree %3 P(sum)
      out  0 %2 S(0)
      out  1 %3 R
    }
  }
  out  0 %2 S(0)
  out  1 %3 R
}
"""


@pytest.mark.parametrize(("text", "graph"), [(DATA_PARALLEL, CONTRACTION), (LOOP, LOOPED)])
def test_text_and_json_round_trip(text: str, graph: object) -> None:
    program = parse_program(text)
    verify(program, graph)  # pyright: ignore[reportArgumentType]
    assert parse_program(format_program(program, graph)) == program  # pyright: ignore[reportArgumentType]
    data = json.loads(json.dumps(program_to_json(program)))
    assert program_from_json(data) == program


def test_golden_text(golden: Golden) -> None:
    golden("data_parallel.txt", format_program(parse_program(DATA_PARALLEL), CONTRACTION))
    golden("loop.txt", format_program(parse_program(LOOP), LOOPED))


# What is replaced in a good program, by what, and how the verifier objects.
GATHER, DOT = "%1 R = all_gather.padded %1 S(1)", "%2 S(0) = dot_general#0(%0 S(0), %1 R)"
WRONG = [
    ("  4: %3 R = all_reduce.ring %3 P(sum)\n", "", "needs %3 as R, established: P(sum)"),
    ("all_gather.padded", "gossip.padded", "there is no collective gossip"),
    ("all_gather.padded", "all_gather.shouted", "all_gather has no strategy 'shouted'"),
    ("all_gather.padded %1 S(1)", "all_gather.padded %1 S(1) from 0", "needs %1 S(1) on {0}, established"),
    (GATHER, "%1 R = all_reduce.ring %1 S(1)", "all_reduce does not turn S(1) into R"),
    (GATHER, "%1 R = broadcast.tree %1 R", "broadcast needs root"),
    (GATHER, "%1 R = send.direct %1 R from 0", "send needs a group of two"),
    (GATHER, "%1 R = broadcast.tree %1 R from 2 on {0,1}", "root 2 is not in"),
    (GATHER, "%1 R = broadcast.tree %1 R from 0 on {1,0}", "in order, each once"),
    ("0: %1 S(1) = slice", "0: %1 S(2) = slice", "of shape (4, 5) cannot be cut as S(2)"),
    ("0: %1 S(1) = slice", "0: %1 S(1:3) = slice", "of shape (4, 5) cannot be cut as S(1:3)"),
    (DOT, "%2 S(1) = dot_general#0(%0 S(0), %1 R)", "no rule of dot_general allows"),
    (DOT, "%2 S(0) = dot_general#9(%0 S(0), %1 R)", "there is no equation 9"),
    (DOT, "%2 S(0) = dot_general#0(%0 S(0))", "has 2 operands and 1 results"),
    ("2.0 R", "2.0 S(0)", "literal 2.0 cannot be sharded"),
    ("out  0 %4 R", "out  0 %4 S(0)", "output %4 is never established as S(0)"),
    ("  in   1 %1 R\n", "", "places another number of inputs"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_verifier_names_the_broken_contract(old: str, new: str, message: str) -> None:
    assert old in DATA_PARALLEL
    with pytest.raises(ProgramError) as caught:
        verify(parse_program(DATA_PARALLEL.replace(old, new)), CONTRACTION)
    assert message in str(caught.value)


def test_verifier_shows_the_lines_around() -> None:
    program = parse_program(DATA_PARALLEL)
    dropped = replace(program, instructions=program.instructions[:4] + program.instructions[5:])
    with pytest.raises(ProgramError) as caught:
        verify(dropped, CONTRACTION)
    error = caught.value
    assert error.place == "instruction 4"
    shown = error.remedy.splitlines()[1:]
    marked = [line for line in shown if line.startswith("> ")]
    assert len(marked) == 1
    assert "mul#2" in marked[0]
    assert any("reduce_sum#1" in line for line in shown)
    assert len(shown) <= 11


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("      2: %3 R = all_reduce.tree %3 P(sum)\n", "", "never established as R"),
        ("      in   0 %0 S(0)\n", "      in   0 %0 S(1)\n", "operand 0 is S(0) outside and S(1) inside"),
        ("%3 R = scan#0", "%3 S(0) = scan#0", "result 1 is S(0) outside and R inside"),
        ("      out  0 %2 S(0)\n", "      out  0 %2 R\n", "result 0 is S(0) outside and R inside"),
    ],
)
def test_verifier_reads_loops(old: str, new: str, message: str) -> None:
    assert old in LOOP
    with pytest.raises(ProgramError) as caught:
        verify(parse_program(LOOP.replace(old, new)), LOOPED)
    assert message in str(caught.value)


def test_state_must_return_as_it_came() -> None:
    graph = trace(lambda p, x: p - x, jnp.ones(4), jnp.ones(4)).graph
    assert graph.state == {0: 0}
    sharded = Signature((Shard(0), Shard(0)), (Shard(0),))
    gathered = Move("all_gather", 2, Shard(0), R, "exact")
    program = Program((Shard(0), Shard(0)), (Compute(0, sharded), gathered), (R,))
    with pytest.raises(ProgramError, match="state output 0 does not return as it came in"):
        verify(program, graph)


def test_what_all_hold_whole_is_held_by_every_group() -> None:
    assert covers(Property(1, R), Property(1, R, (0, 2)))
    assert covers(Property(1, R, (0, 1, 2)), Property(1, R, (1,)))
    assert not covers(Property(1, R, (0, 1)), Property(1, R))
    assert not covers(Property(1, R, (0, 1)), Property(1, R, (1, 2)))
    assert not covers(Property(1, Shard(0)), Property(1, Shard(0), (0, 1)))
    assert not covers(Property(1, R), Property(2, R))


@pytest.mark.parametrize("text", ["R", "S(0)", "S(12)", "S(3:64)", "P(sum)", "P(max)", "P(min)"])
def test_placements_print_and_parse_back(text: str) -> None:
    assert str(parse_placement(text)) == text


@pytest.mark.parametrize("text", ["", "Q", "S()", "S(-1)", "P(mean)", "R ", f"S({'9' * 5000})"])
def test_no_placement(text: str) -> None:
    with pytest.raises(ProgramError, match="is none of R"):
        parse_placement(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("program {\n  in 0 %0 R\n  nonsense\n}", "line 3 (nonsense)"),
        ("program {\n  in 0 %0 R\n", "end of text"),
        ("in 0 %0 R\n}", "line 1"),
        ("program {\n}\nmore", "line 3 (more)"),
        ("program {\n  0: %1 R = scan#0(%0 R) {", "end of text"),
        ("program {\n  0: %1 X = slice %1 R\n}", "placement 'X'"),
    ],
)
def test_text_that_does_not_parse(text: str, line: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse_program(text)
    assert line in caught.value.place


GOOD = program_to_json(parse_program(LOOP))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("inputs",), None, "program.inputs: is None, not a list"),
        (("inputs", 0), 3, "program.inputs[0]: is 3, not a text"),
        (("inputs", 0), "S(x)", "placement 'S(x)'"),
        (("instructions", 0), {"value": 1}, "program.instructions[0]: lacks compute"),
        (("instructions", 0, "root"), True, "program.instructions[0].root: is True, not a whole number"),
        (("instructions", 0, "speed"), 1, "program.instructions[0]: has unknown speed"),
        (
            ("instructions", 4, "bodies", 0, "outputs"),
            {},
            "instructions[4].bodies[0].outputs: is {}, not a list",
        ),
    ],
)
def test_json_that_does_not_parse(path: tuple[str | int, ...], value: object, message: str) -> None:
    data = json.loads(json.dumps(GOOD))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ProgramError) as caught:
        program_from_json(data)
    assert message in str(caught.value)


def test_partial_outputs_may_be_named() -> None:
    program = Program((R,), (Move("own", 0, R, Partial("max")),), (Partial("max"),))
    graph = trace(lambda x: x, jnp.ones(3), state={}).graph
    verify(program, graph)
    assert parse_program(format_program(program, graph)) == program
