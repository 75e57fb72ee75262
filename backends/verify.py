"""Does a distributed program compute what the single-device step computes?

End to end the leaves cannot be compared: some are pure rounding noise. (The gradient of an attention key
bias is zero in exact arithmetic; summing a batch of 16 as 5 + 11 moves it by 9 %.) So like is compared
with like. The program runs on `reference`, every value handed out and no instruction fused with another;
then, instruction by instruction,

- a computation is repeated by one device on the *gathered* inputs that the program itself had at that
  point, and its gathered outputs are compared (every replica of a replicated one). The group is one
  equation; of a loop, one equation of one iteration of its body;
- a move is compared with the gathered value it started from.

On two mesh axes what is replicated on one of them is gathered as each node, or each of its devices, sees it.

Nothing is chained, so no error of one group reaches the next. Error of a tensor: max|a - b| / scale with
scale = max|b|, b being the one device's. Linear operations that sum (contractions, reductions, additions,
whatever reads a Partial) take the larger of that and max op(|inputs|), where |x| of a Partial(sum) is the
sum of the absolute values that the devices hold: rounding errors of a sum are proportional to the sum of
the absolute terms, not to a result that cancels (Higham, Accuracy and Stability of Numerical Algorithms,
sections 3.1 and 4.2). They grow with the square root of the number n of terms (Higham & Mary, SIAM J. Sci.
Comput. 41, 2019): from about 28,000 terms on, where sqrt(n) 2^-24 passes the tolerance, so does the scale.

Tolerance: 1e-5 where the group is wholly float32 or wider, 2e-2 where a 16-bit or 8-bit float is in it,
integers, booleans and keys exactly. Equal infinities and NaNs at equal places are equal.

Finally the scalar outputs that are no state (the loss) are compared end to end with `jax.jit` of the
single-device step, at the tolerance of the whole step. The scale of what is nearly zero there (the mean of
normalized numbers) is how much it changes per relative change of the arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardwright.backends.closeness import (
    largest,
    magnitude,
    narrow,
    rel_error,
    rounded,
    sensitivity,
    sums,
    term_count,
    vanishing,
    widened,
)
from shardwright.backends.compile import QUICK, Compiler
from shardwright.backends.layout import (
    as_array,
    check_inputs,
    from_numpy,
    gather,
    holds,
    members,
    to_numpy,
)
from shardwright.backends.reference import Locals, ReferenceMachine, scatter
from shardwright.backends.runner import run
from shardwright.backends.single import Flat, bind, single_device
from shardwright.ir.flow import find, reads, writes
from shardwright.ir.graph import Graph, Literal, TensorType
from shardwright.ir.jaxpr import source_line
from shardwright.ir.placement import Grid, Partial, Placement, R, Replicate, Shard, node_members, seat
from shardwright.ir.program import Compute, Move, Program, Property, nodes_of
from shardwright.ir.segments import Exchange, Relay, Segment, Step, schedule
from shardwright.ir.trace import Traced

TOLERANCE = 1e-5
TOLERANCE_NARROW = 2e-2


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the comparison found.

    Attributes:
        ok: every group and the loss are within their tolerance.
        max_rel_error: largest error of a group that is wholly float32 or wider.
        max_rel_error_narrow: largest error of a group with 16-bit or 8-bit floats.
        loss_rel_error: largest end-to-end error of a scalar output that is no state; 0 if there is none.
        worst: where the error is largest relative to its tolerance, in words.
        groups: how many comparisons were made.
    """

    ok: bool
    max_rel_error: float
    max_rel_error_narrow: float
    loss_rel_error: float
    worst: str
    groups: int

    def __str__(self) -> str:
        wide, narrower = f"(allowed {TOLERANCE:.0e})", f"(allowed {TOLERANCE_NARROW:.0e})"
        lines = [
            f"{'verified' if self.ok else 'MISMATCH'}: {self.groups} comparisons with one device",
            f"  largest relative error, float32 and wider: {self.max_rel_error:.2e} {wide}",
            f"  largest relative error, 16-bit and 8-bit:  {self.max_rel_error_narrow:.2e} {narrower}",
            f"  largest relative error, loss end to end:   {self.loss_rel_error:.2e}",
            f"  worst: {self.worst}",
        ]
        return "\n".join(lines)


@np.errstate(all="ignore")  # what is infinite or not a number is compared as such; numpy would warn of it
def verify_program(
    traced: Traced,
    program: Program,
    ratios: Sequence[float],
    flat_args: Sequence[Any],
    step: Flat | None = None,
) -> VerifyResult:
    """Compare a distributed program with the single-device step, on all devices in this process.

    Args:
        traced: the step.
        program: a program over its graph that `shardwright.ir.program.verify` accepts.
        ratios: share of every device.
        flat_args: concrete leaves of the step's arguments.
        step: flat arguments -> flat outputs of the user's own function, for the end-to-end comparison; by
            default the traced graph itself is run.
    """
    graph = traced.graph
    check_inputs(flat_args, graph)
    checker = _Checker(traced, program, ratios)
    machine = ReferenceMachine(traced, ratios, checker.observe)
    pairs = zip(flat_args, graph.inputs, program.inputs, strict=True)
    held = [scatter(leaf, value.type, placement, ratios) for leaf, value, placement in pairs]
    results = run(schedule(program, graph, inspect=True), held, machine)
    losses = [i for i, a in enumerate(graph.outputs) if i not in graph.state and a.type.rank == 0]
    alone = single_device(traced, losses, step)
    args = [as_array(leaf, value.type) for leaf, value in zip(flat_args, graph.inputs, strict=True)]
    whole = alone(args)
    changes: list[float] = []
    for number, (i, wanted) in enumerate(zip(losses, whole, strict=True)):
        tensor, name = graph.outputs[i].type, graph.output_names[i] if graph.output_names else ""
        got = gather(results[i], tensor, program.outputs[i])
        error = rel_error(got, wanted, tensor)
        if error > checker.tolerance and rounded(tensor):
            changes = changes or sensitivity(alone, args, whole, checker.tolerance)
            error = rel_error(got, wanted, tensor, changes[number])
        checker.add_loss(error, f"output {name or i} end to end")
    return checker.result()


def _replicated(placement: Placement) -> bool:
    """Whether there are several of a value: on all devices, in every node, or in each on its devices."""
    return R in ((placement.across, placement.within) if isinstance(placement, Grid) else (placement,))


class _Checker:
    """Compares every instruction of a run with one device; keeps the worst."""

    def __init__(self, traced: Traced, program: Program, ratios: Sequence[float]) -> None:
        self.program = program
        self.primitives = traced.primitives
        self.ratios = ratios
        self.compiler = Compiler(QUICK)
        self.types: dict[int, dict[int, TensorType]] = {}
        self.graphs: list[Graph] = []
        self.errors = {False: 0.0, True: 0.0}
        self.loss = 0.0
        self.worst = (0.0, "no difference at all")
        self.groups = 0
        self.any_narrow = any(
            narrow(v.type) for e in traced.graph.all_equations() for v in (*e.outputs, *e.input_values)
        )
        self.tolerance = TOLERANCE_NARROW if self.any_narrow else TOLERANCE

    def observe(self, step: Step, graph: Graph, values: Mapping[Property, Locals]) -> None:
        """Called after each step of the run with all it read and wrote."""
        if isinstance(step, Exchange):
            self._move(step.move, graph, values)
        elif isinstance(step, Segment):
            for instruction in step.instructions:
                if isinstance(instruction, Move):
                    self._move(instruction, graph, values)
            computes = [instruction for instruction in step.instructions if isinstance(instruction, Compute)]
            self._computes(computes, graph, values)
        elif isinstance(step, Relay):
            self._computes([step.compute], graph, values)

    def _move(self, move: Move, graph: Graph, values: Mapping[Property, Locals]) -> None:
        (after,) = writes(move, graph)
        before = find(reads(move, graph)[0], values)
        tensor = self._types(graph)[move.value]
        wanted = self._gather(values[before], tensor, before)
        terms = 0.0
        if rounded(tensor):
            sizes = np.abs(widened(to_numpy(self._absolute(values[before], tensor, before))))
            terms = float(np.max(sizes[np.isfinite(sizes)], initial=0.0))
            # What nodes have rounded apart before, a move cannot bring together again. (Doubled: what is just
            # as far apart must not hang on the last digit.)
            terms = max(terms, 2 * self._spread(values[before], tensor, before) / TOLERANCE)
        for got in self._candidates(values[after], tensor, after):
            self._add(rel_error(got, wanted, tensor, terms), narrow(tensor), f"{move.kind} of %{move.value}")

    def _computes(self, computes: Sequence[Compute], graph: Graph, values: Mapping[Property, Locals]) -> None:
        """Repeat the computations of a segment on one device: in one function, but none feeds another."""
        types = self._types(graph)
        read = list(dict.fromkeys(prop for compute in computes for prop in reads(compute, graph)))
        sizes = [self._absolute(values[prop], types[prop.value], prop) for prop in read]

        def repeat(whole: Sequence[Any], sizes: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
            operands, absolute = dict(zip(read, whole, strict=True)), dict(zip(read, sizes, strict=True))
            return [self._repeat(compute, graph, operands, absolute) for compute in computes]

        for number, devices in enumerate(self._alike(read, types, values)):
            whole = [self._gather(values[prop], types[prop.value], prop, devices[0]) for prop in read]
            repeated = self.compiler.share(repeat, (whole, sizes))(whole, sizes)
            for compute, (wanted, terms) in zip(computes, repeated, strict=True):
                equation = graph.equations[compute.equation]
                is_narrow = any(map(narrow, (*equation.input_types, *equation.output_types)))
                where = f"{equation.primitive} at {source_line(equation)}"
                ends = zip(equation.outputs, compute.signature.outs, wanted, terms, strict=True)
                for value, placement, expected, scale in ends:
                    prop = Property(value.index, placement)
                    if number and not _replicated(placement):
                        continue
                    for got in self._candidates(values[prop], value.type, prop, devices):
                        self._add(rel_error(got, expected, value.type, float(scale)), is_narrow, where)

    def _spread(self, value: Locals, tensor: TensorType, prop: Property) -> float:
        """Largest difference of a value's replicas, on two mesh axes."""
        if nodes_of(self.program) is None or not _replicated(prop.placement):
            return 0.0
        first, *others = (widened(to_numpy(each)) for each in self._candidates(value, tensor, prop))
        apart = (np.abs(x - first) for x in others)
        return max((float(np.max(d, initial=0.0, where=~np.isnan(d))) for d in apart), default=0.0)

    def _alike(
        self, read: Sequence[Property], types: Mapping[int, TensorType], values: Mapping[Property, Locals]
    ) -> list[list[int]]:
        """Devices by what they see of replicated operands: on two mesh axes nodes may have rounded apart."""
        if nodes_of(self.program) is None:
            return [list(range(len(self.ratios)))]
        found: dict[tuple[bytes, ...], list[int]] = {}
        known: dict[tuple[Placement | int, ...], bytes] = {}

        def digest(prop: Property, device: int) -> bytes:
            parts, placement = self._seen(values[prop], prop, device)
            key = placement, *map(id, parts)
            if key not in known:
                whole = gather(parts, types[prop.value], placement)
                known[key] = hashlib.sha256(to_numpy(whole).tobytes()).digest()
            return known[key]

        replicated = [prop for prop in read if _replicated(prop.placement)]
        for device in range(len(self.ratios)):
            found.setdefault(tuple(digest(prop, device) for prop in replicated), []).append(device)
        return list(found.values())

    def _repeat(
        self, compute: Compute, graph: Graph, whole: Mapping[Property, Any], sizes: Mapping[Property, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Results of one equation, and of each the size of its terms: max op(|inputs|), 0 if not linear."""
        equation = graph.equations[compute.equation]
        operands: list[Any] = []
        absolute: list[Any] = []
        for atom, placement in zip(equation.inputs, compute.signature.ins, strict=True):
            if isinstance(atom, Literal):
                operands.append(jnp.asarray(atom.value, dtype=atom.type.dtype))
                absolute.append(magnitude(operands[-1]))
            else:
                operands.append(whole[Property(atom.index, placement)])
                absolute.append(sizes[Property(atom.index, placement)])
        results = bind(equation, self.primitives, operands)
        if not sums(equation, compute.signature):
            return results, [0.0] * len(results)
        growth = max(1.0, term_count(equation) ** 0.5 * 2**-24 / TOLERANCE)
        terms = (
            [absolute[0] + absolute[1]]
            if equation.primitive == "sub"
            else bind(equation, self.primitives, absolute)
        )
        lost = vanishing(equation) / TOLERANCE
        return results, [jnp.maximum(largest(x) * growth, lost) for x in terms]

    def _types(self, graph: Graph) -> dict[int, TensorType]:
        if id(graph) not in self.types:
            self.graphs.append(graph)
            self.types[id(graph)] = {value.index: value.type for value in graph.values()}
        return self.types[id(graph)]

    def _parts(self, value: Locals, prop: Property) -> list[Any]:
        return [value[device] for device in members(prop.group, len(self.ratios))]

    def _seen(self, value: Locals, prop: Property, device: int) -> tuple[Sequence[Any], Placement]:
        """The parts that make up the global value as `device` sees it, its own among them, and how."""
        placement = prop.placement
        if isinstance(placement, Replicate):
            return [value[device]], placement
        if isinstance(placement, Grid):
            nodes = node_members(placement.nodes)
            node, place = seat(device, placement.nodes)
            if isinstance(placement.across, Replicate):
                return [value[i] for i in nodes[node]], placement.within
            if isinstance(placement.within, Replicate):
                return [value[devices[min(place, len(devices) - 1)]] for devices in nodes], placement.across
        return self._parts(value, prop), placement

    def _gather(self, value: Locals, tensor: TensorType, prop: Property, device: int | None = None) -> Any:
        """The global value; of one that is replicated, on one mesh axis at least, as `device` sees it."""
        if device is None or not holds(prop, device):
            device = members(prop.group, len(self.ratios))[0]
        parts, placement = self._seen(value, prop, device)
        return gather(parts, tensor, placement)

    def _candidates(
        self, value: Locals, tensor: TensorType, prop: Property, devices: Sequence[int] | None = None
    ) -> Iterator[Any]:
        """The gathered value; of a replicated one every distinct replica that `devices` see (None: all)."""
        every = members(prop.group, len(self.ratios)) if devices is None or prop.group else devices
        seen = {tuple(map(id, self._seen(value, prop, device)[0])): device for device in every}
        yield from (self._gather(value, tensor, prop, device) for device in seen.values())

    def _absolute(self, value: Locals, tensor: TensorType, prop: Property) -> Any:
        """|x|; of a Partial(sum) the sum of what the devices hold of it, without signs."""
        if not rounded(tensor):
            return self._gather(value, tensor, prop)
        # On the host: an operation of JAX's would be compiled for every shape.
        parts = [np.abs(widened(to_numpy(part))) for part in self._parts(value, prop)]
        if isinstance(prop.placement, Shard):
            return from_numpy(np.concatenate(parts, axis=prop.placement.dim), tensor.dtype)
        if isinstance(prop.placement, Grid):
            return gather([from_numpy(part, tensor.dtype) for part in parts], tensor, prop.placement)
        return from_numpy(
            reduce(np.add, parts) if prop.placement == Partial("sum") else parts[0], tensor.dtype
        )

    def _add(self, error: float, is_narrow: bool, where: str) -> None:
        self.groups += 1
        self.errors[is_narrow] = max(self.errors[is_narrow], error)
        relative = error / (TOLERANCE_NARROW if is_narrow else TOLERANCE)
        if relative > self.worst[0]:
            self.worst = (relative, f"{error:.2e} in {where}")

    def add_loss(self, error: float, where: str) -> None:
        self.loss = max(self.loss, error)
        relative = error / self.tolerance
        if relative > self.worst[0]:
            self.worst = (relative, f"{error:.2e} in {where}")

    def result(self) -> VerifyResult:
        return VerifyResult(
            ok=self.worst[0] <= 1.0,
            max_rel_error=self.errors[False],
            max_rel_error_narrow=self.errors[True],
            loss_rel_error=self.loss,
            worst=self.worst[1],
            groups=self.groups,
        )
