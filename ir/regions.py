"""Regions: how operands and results of scan, while and cond meet the inputs and outputs of their bodies.

A `Port` ties a body input or output to an operand, a result, or another port, and says how their
placements correspond: a scanned operand is sliced along its leading dimension, so `S(d + 1)` outside
is `S(d)` inside; a carry must come back as it went in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

from shardwright.ir.errors import TraceError
from shardwright.ir.graph import Equation
from shardwright.ir.placement import Grid, Placement, R, Shard, Single, cuts, grid
from shardwright.ir.rules import Signature

#: Placements of the inputs and of the outputs of a body.
Ends: TypeAlias = tuple[Sequence[Placement], Sequence[Placement]]


@dataclass(frozen=True, slots=True)
class Port:
    """Operand (or result) `outer` of the equation is input (or output) `inner` of region `region`.

    `stacked`: the outer tensor has one leading dimension more, the iterations.
    """

    outer: int
    region: int
    inner: int
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Boundary:
    """How an equation with regions is wired.

    Attributes:
        ins: operand -> body input.
        outs: body output -> result.
        carries: (region, body output, region, body input) that must have the same placement.
        replicated_operands: operands that must be replicated and enter no body (the index of a cond).
        replicated_outputs: (region, body output) that every device needs whole (a while's condition).
        trips: how often each region runs, for prices; None where it is known only at run time.
    """

    ins: tuple[Port, ...]
    outs: tuple[Port, ...]
    carries: tuple[tuple[int, int, int, int], ...] = ()
    replicated_operands: tuple[int, ...] = ()
    replicated_outputs: tuple[tuple[int, int], ...] = ()
    trips: tuple[int | None, ...] = (1,)

    def check(self, signature: Signature, bodies: Sequence[Ends]) -> str:
        """What is wrong with placements of the equation against those of its bodies; "" if nothing."""
        for port in self.ins:
            inside, outside = bodies[port.region][0][port.inner], signature.ins[port.outer]
            if outer_placement(inside, port.stacked) != outside:
                return f"operand {port.outer} is {outside} outside and {inside} inside region {port.region}"
        for port in self.outs:
            inside, outside = bodies[port.region][1][port.inner], signature.outs[port.outer]
            if outer_placement(inside, port.stacked) != outside:
                return f"result {port.outer} is {outside} outside and {inside} inside region {port.region}"
        for from_region, out, to_region, into in self.carries:
            before, after = bodies[to_region][0][into], bodies[from_region][1][out]
            if before != after:
                return f"carry {into} goes in as {before} and comes back as {after}"
        for operand in self.replicated_operands:
            if signature.ins[operand] != R:
                return f"operand {operand} must be R"
        for region, out in self.replicated_outputs:
            if bodies[region][1][out] != R:
                return f"output {out} of region {region} must be R"
        return ""


def entering(equation: Equation, region: int) -> frozenset[int]:
    """The inputs of a region that are there beside the operands: rows of these, and what is carried."""
    wiring = boundary(equation)
    rows = {port.inner for port in wiring.ins if port.stacked and port.region == region}
    return frozenset(rows.union(into for _, _, to, into in wiring.carries if to == region))


def stacked_results(equation: Equation) -> frozenset[int]:
    """Results that have a place from the beginning of a loop on: every iteration makes a row of them."""
    return frozenset(port.outer for port in boundary(equation).outs if port.stacked)


def outer_placement(inside: Placement, stacked: bool) -> Placement:
    """Placement outside a region of a tensor placed `inside`."""
    if stacked and isinstance(inside, Grid):
        return grid(_shifted(inside.across, 1), _shifted(inside.within, 1), inside.nodes)
    return inside if isinstance(inside, Grid) or not stacked else _shifted(inside, 1)


def inner_placement(outside: Placement, stacked: bool) -> Placement | None:
    """Inverse of `outer_placement`; None where the iterations themselves are sharded."""
    if not stacked or not cuts(outside):
        return outside
    if any(cut.dim == 0 for cut in cuts(outside)):
        return None
    if isinstance(outside, Grid):
        return grid(_shifted(outside.across, -1), _shifted(outside.within, -1), outside.nodes)
    return _shifted(outside, -1)


@cache
def _shifted(placement: Single, by: int) -> Single:
    return replace(placement, dim=placement.dim + by) if isinstance(placement, Shard) else placement


def boundary(equation: Equation) -> Boundary:
    """The wiring of a scan, while or cond.

    Raises:
        TraceError: the equation has regions of an unknown kind.
    """
    wire = {"scan": _scan, "while": _while, "cond": _cond}.get(equation.primitive)
    if wire is None:
        raise TraceError(
            place=f"equation {equation.index} ({equation.primitive}, {equation.source})",
            reason="has regions of an unknown kind",
            remedy="Add its wiring to shardwright/ir/regions.py",
        )
    return wire(equation)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # From jax 0.12 on, `ft_in` holds the structure of (constants, carry, scanned).
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants.vals), len(carry.vals)


def _scan(equation: Equation) -> Boundary:
    consts, carries = scan_counts(equation.params)
    ins = tuple(Port(i, 0, i, stacked=i >= consts + carries) for i in range(len(equation.inputs)))
    outs = tuple(Port(i, 0, i, stacked=i >= carries) for i in range(len(equation.outputs)))
    loop = tuple((0, i, 0, consts + i) for i in range(carries))
    return Boundary(ins, outs, loop, trips=(equation.params["length"],))


def _while(equation: Equation) -> Boundary:
    """Regions: condition, body. Operands: constants of the condition, of the body, then the carry."""
    of_cond, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    carries = range(len(equation.outputs))
    ins = [Port(i, 0, i) for i in range(of_cond)]
    ins += [Port(of_cond + i, 1, i) for i in range(of_body)]
    ins += [Port(of_cond + of_body + i, 0, of_cond + i) for i in carries]
    ins += [Port(of_cond + of_body + i, 1, of_body + i) for i in carries]
    outs = tuple(Port(i, 1, i) for i in carries)
    loop = tuple((1, i, region, (of_cond, of_body)[region] + i) for i in carries for region in (0, 1))
    return Boundary(tuple(ins), outs, loop, replicated_outputs=((0, 0),), trips=(None, None))


def _cond(equation: Equation) -> Boundary:
    """Operand 0 chooses the branch; the others enter every branch."""
    branches = range(len(equation.regions))
    ins = tuple(Port(i + 1, b, i) for b in branches for i in range(len(equation.inputs) - 1))
    outs = tuple(Port(i, b, i) for b in branches for i in range(len(equation.outputs)))
    return Boundary(ins, outs, replicated_operands=(0,), trips=tuple(None for _ in branches))
