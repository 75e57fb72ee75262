"""Runs a schedule on a machine: the control flow that all backends share.

A machine says what a held value is (one local array, or one per device), how a segment and an exchange
are carried out, and the few things host-run loops need. Everything about order, loops, literals and
lifetimes is here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias, TypeVar

from shardwright.ir.flow import inputs
from shardwright.ir.graph import Atom, Equation, Graph, Literal, TensorType, Value
from shardwright.ir.placement import Placement
from shardwright.ir.program import Program, Property
from shardwright.ir.regions import boundary, scan_counts
from shardwright.ir.rules import Signature
from shardwright.ir.segments import Away, Back, Exchange, LoopStep, Relay, Schedule, Segment, Step
from shardwright.ir.text import format_instruction

Held = TypeVar("Held")


#: Runs a loop's region.
Body: TypeAlias = Callable[[Sequence[Held]], list[Held]]


class Loops(Protocol[Held]):
    """What loops need that the host runs."""

    def take(self, value: Held, iteration: int) -> Held:
        """One iteration of a stacked operand."""
        ...

    def rows(self, tensor: TensorType, placement: Placement) -> Held:
        """Room for a stacked result of global type `tensor`, of which every iteration writes a row."""
        ...

    def put(self, rows: Sequence[Held], iteration: int, values: Sequence[Held]) -> list[Held]:
        """The same memory with the values of an iteration in it; nobody else may have `rows`."""
        ...

    def decide(self, value: Held) -> int:
        """A replicated scalar that decides where control goes, the same on every device."""
        ...


class Machine(Loops[Held], Protocol[Held]):
    """What a backend provides to run schedules."""

    def segment(self, segment: Segment, graph: Graph, args: Sequence[Held]) -> Sequence[Held]:
        """Run a segment: from the values of `segment.needs` those of `segment.gives`."""
        ...

    def exchange(self, exchange: Exchange, graph: Graph, tensor: TensorType, value: Held) -> Held:
        """Carry out a collective on a value of global type `tensor`."""
        ...

    def relay(self, step: Relay, graph: Graph, args: Sequence[Held]) -> Sequence[Held]:
        """Run layers as stages, from the operands of the equation to its results."""
        ...

    def away(self, value: Held) -> Held:
        """A value, moved to host memory."""
        ...

    def back(self, value: Held) -> Held:
        """A value that was moved there, on its device again."""
        ...

    def literal(self, atom: Literal, placement: Placement) -> Held:
        """A literal in a placement."""
        ...

    def constant(self, value: Value, array: object) -> Held:
        """A constant of a graph, on every device."""
        ...


class Walked(Protocol):
    """A program in the order in which it is run."""

    @property
    def program(self) -> Program: ...
    @property
    def graph(self) -> Graph: ...


class Positioned(Protocol):
    """A step of such an order."""

    @property
    def first(self) -> int: ...


class At:
    """Context that notes on an escaping error at which instruction it happened."""

    def __init__(self, of: Walked, step: Positioned) -> None:
        self.of = of
        self.step = step

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            text = format_instruction(self.of.program, self.of.graph, self.step.first)
            what = "in the segment from " if isinstance(self.step, Segment) else "at "
            error.add_note(f"{what}instruction {text}")


def run(
    schedule: Schedule,
    args: Iterable[Held],
    machine: Machine[Held],
    seen: Callable[[Step, Mapping[Property, Held]], None] | None = None,
) -> list[Held]:
    """Outputs of a schedule from its inputs, in the placements the program gives them.

    Args:
        schedule: the steps.
        args: one value per input.
        machine: carries the steps out.
        seen: told after every step what is held, before what nobody reads any more is dropped.
    """
    graph, program = schedule.graph, schedule.program
    constants = [machine.constant(value, array) for value, array in graph.constants.items()]
    env = dict(zip(inputs(program, graph), [*args, *constants], strict=True))
    for step in schedule.steps:
        with At(schedule, step):
            results: Sequence[Held]
            if isinstance(step, Segment):
                results = machine.segment(step, graph, [env[prop] for prop in step.needs])
            elif isinstance(step, Exchange):
                results = [machine.exchange(step, graph, schedule.types[step.move.value], env[step.needs[0]])]
            elif isinstance(step, Relay):
                equation, ins = graph.equations[step.compute.equation], step.compute.signature.ins
                args = [_read(a, p, env, machine) for a, p in zip(equation.inputs, ins, strict=True)]
                results = machine.relay(step, graph, args)
            elif isinstance(step, Away):
                results = [machine.away(env[prop]) for prop in step.needs]
            elif isinstance(step, Back):
                results = [env[p] if p in step.stayed else machine.back(env[p]) for p in step.needs]
            else:
                results = _loop(step, graph, env, machine)
            env.update(zip(step.gives, results, strict=True))
            if seen is not None:
                seen(step, env)
            for prop in step.drops:
                del env[prop]
    return [_read(a, p, env, machine) for a, p in zip(graph.outputs, program.outputs, strict=True)]


def _read(atom: Atom, placement: Placement, env: dict[Property, Held], machine: Machine[Held]) -> Held:
    return (
        machine.literal(atom, placement)
        if isinstance(atom, Literal)
        else env[Property(atom.index, placement)]
    )


def _loop(step: LoopStep, graph: Graph, env: dict[Property, Held], machine: Machine[Held]) -> list[Held]:
    """Results of a loop whose iterations the host runs one after another."""
    equation = graph.equations[step.loop.equation]
    signature = step.loop.signature
    args = [_read(a, p, env, machine) for a, p in zip(equation.inputs, signature.ins, strict=True)]

    def runs(body: Schedule) -> Body[Held]:
        return lambda args: run(body, args, machine)

    return iterate(equation, signature, args, [runs(body) for body in step.bodies], machine)


def iterate(
    equation: Equation,
    signature: Signature,
    args: Sequence[Held],
    bodies: Sequence[Body[Held]],
    machine: Loops[Held],
) -> list[Held]:
    """Results of a loop from its operands; `bodies` run the equation's regions, in their order."""
    params = equation.params
    if equation.primitive == "cond":
        branch = min(max(machine.decide(args[0]), 0), len(bodies) - 1)
        return bodies[branch](args[1:])
    if equation.primitive == "while":
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        for_cond, for_body = args[:of_cond], args[of_cond : of_cond + of_body]
        state = list(args[of_cond + of_body :])
        while machine.decide(bodies[0]([*for_cond, *state])[0]):
            state = bodies[1]([*for_body, *state])
        return state
    ports = boundary(equation)
    first, count = scan_counts(params)
    scanned = {port.outer for port in ports.ins if port.stacked}
    carry, length = list(args[first : first + count]), params["length"]
    # What is stacked is written where it stays: the pieces of all iterations are never there beside it.
    ends = zip(equation.output_types[count:], signature.outs[count:], strict=True)
    stacked = [machine.rows(tensor, placement) for tensor, placement in ends]
    for iteration in reversed(range(length)) if params["reverse"] else range(length):
        xs = [machine.take(arg, iteration) for i, arg in enumerate(args) if i in scanned]
        results = bodies[0]([*args[:first], *carry, *xs])
        carry = results[:count]
        if stacked:
            stacked = machine.put(stacked, iteration, results[count:])
    return [*carry, *stacked]
