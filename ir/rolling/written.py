"""A step written again, as a function: what it has once for each layer, as loops and on stacks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.ir.dtypes import dtype_of
from shardwright.ir.graph import Atom, Equation, Graph, Literal, Value
from shardwright.ir.rewrites.replay import as_traced, results_of
from shardwright.ir.rolling.layers import in_layers
from shardwright.ir.rolling.parts import Given, Group, Loop, Mapped, Scanned, Stack
from shardwright.ir.rolling.slots import Own, Place, Rows, Same
from shardwright.ir.rolling.stacks import Stacks
from shardwright.ir.rolling.totals import Chains, Total

#: What makes something: one equation, a loop, an equation on stacks, or a stack put together from its rows.
Node: TypeAlias = Equation | Loop | Group | Stack


class _Row(NamedTuple):
    """One layer's of a stack."""

    stack: Stack
    layer: int


class _Last(NamedTuple):
    """What the last iteration of a loop hands on."""

    loop: Loop
    place: Place


_Ref: TypeAlias = Value | Literal | _Row | _Last | Stack


@dataclass(frozen=True, slots=True)
class Written:
    """A step with loops over layers.

    Attributes:
        layers: how many, of every family of them.
        inputs: of every argument of `run`, the step's: one, or one per layer, which are stacked.
        outputs: of every result, the step's.
        run: the step, of flat arguments.
    """

    layers: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    run: Callable[..., list[Any]]


def written(graph: Graph, primitives: Mapping[str, Any], sorts: Sequence[Hashable]) -> Written | None:
    """A step with loops over its layers; None if none are found.

    Args:
        graph: the step.
        primitives: JAX primitives by name.
        sorts: of every argument; those of different sorts are not stacked.
    """
    single: set[Equation] = set()
    while True:
        stacks = in_layers(graph, sorts, single)
        if stacks is None:
            return None
        writer = _Writer(stacks, primitives)
        if writer.circle is None:
            return writer.written()
        single |= writer.circle


class _Writer:
    def __init__(self, stacks: Stacks, primitives: Mapping[str, Any]) -> None:
        self._stacks, self._primitives = stacks, primitives
        self._chains = Chains(stacks)
        stacks.spread()
        graph = stacks.graph
        continued = {i: k for k, i in graph.state.items()}
        self._ends: list[tuple[tuple[int, ...], _Ref]] = []
        done: set[int] = set()
        for stack in stacks.all:  # of which there are more with what they become: other arguments, for one
            if not isinstance(stack.source, Given):
                continue
            outs = [continued.get(graph.inputs.index(row)) for row in stack.rows if isinstance(row, Value)]
            places = tuple([k for k in outs if k is not None])
            if places:
                rows = tuple([graph.outputs[k] for k in places])
                found = stacks.stacked(rows, stack.family, join=True)
                assert found is not None, "what is no stack is joined to one"
                self._ends.append((places, found))
                done.update(places)
        for k, atom in enumerate(graph.outputs):
            if k not in done:
                self._ends.append(((k,), self._ref(atom)))
        self._ends.sort(key=lambda end: end[0][0])
        self._totals: dict[Equation, Total | None] = {}
        #: Of every loop, what there has to be of each of its iterations.
        self._wanted: dict[Loop, list[Stack]] = {}
        self.nodes: list[Node] = []
        #: Equations of groups of which each waits for the other; None if there are none.
        self.circle = self._ordered()

    def _ref(self, atom: Atom) -> _Ref:
        """What an atom is in the new step."""
        atom = self._stacks.same(atom)
        made = self._stacks.loop_of(atom)
        if made is not None:
            loop, place, iteration = made
            if iteration == loop.body.run.times - 1 and place in loop.starts:
                return _Last(loop, place)
            return _Row(self._stacks.scanned(loop, place), loop.layers[iteration])
        if isinstance(atom, Value) and atom in self._stacks.row_of:
            return _Row(*self._stacks.row_of[atom])
        return atom

    # Order

    def _node(self, ref: _Ref) -> Node | None:
        """What makes something that is needed, if anything does."""
        if isinstance(ref, _Last):
            return ref.loop
        stack = ref.stack if isinstance(ref, _Row) else ref
        if isinstance(stack, Stack):
            source = stack.source
            if isinstance(source, Given):
                return None
            if isinstance(source, Scanned):
                wanted = self._wanted.setdefault(source.loop, [])
                if stack not in wanted:
                    wanted.append(stack)
                return source.loop
            return source.group if isinstance(source, Mapped) else stack
        at = self._stacks.makers.get(stack) if isinstance(stack, Value) else None
        return None if at is None else self._stacks.order[at[0]]

    def _needs(self, node: Node) -> Iterator[_Ref]:
        if isinstance(node, Equation):
            if node not in self._totals:
                self._totals[node] = self._chains.total(node)
            total = self._totals[node]
            yield from map(self._ref, node.inputs if total is None else total.rest)
            yield from () if total is None else total.stacks
        elif isinstance(node, Group):
            yield from (o if isinstance(o, Stack) else self._ref(o) for o in node.operands)
        elif isinstance(node, Stack):
            yield from map(self._ref, node.rows)
        else:
            yield from map(self._ref, node.starts.values())
            yield from node.stacks.values()
            yield from (self._ref(atom) for _, _, atom in self._shared(node))

    def _shared(self, loop: Loop) -> Iterator[tuple[int, int, Atom]]:
        """Operands in a body that are the same in all iterations, and made outside of it."""
        run, body = loop.body.run, loop.body
        for position, slots in enumerate(body.slots):
            for k, slot in enumerate(slots) if position not in body.once else ():
                if isinstance(slot, Same):
                    yield position, k, slot.atom
                elif isinstance(slot, Own) and slot.place[0] in body.once:
                    at, result = slot.place
                    yield position, k, self._stacks.order[run.first + at].outputs[result]

    def _ordered(self) -> set[Equation] | None:
        """Put what is needed into an order in which it can run."""
        needs: dict[Node, list[Node]] = {}  # no sets: their order would be another in every process
        waiting = [node for _, ref in self._ends if (node := self._node(ref)) is not None]
        while waiting:
            node = waiting.pop()
            if node not in needs:
                found = (n for ref in self._needs(node) if (n := self._node(ref)) is not None)
                needs[node] = list(dict.fromkeys(found))
                waiting.extend(needs[node])
        users: dict[Node, list[Node]] = {node: [] for node in needs}
        left = {node: len(before) for node, before in needs.items()}
        for node, before in needs.items():
            for other in before:
                users[other].append(node)
        ready = [(self._at(node), number, node) for number, node in enumerate(needs) if not left[node]]
        heapq.heapify(ready)
        numbers = {node: number for number, node in enumerate(needs)}
        while ready:
            *_, node = heapq.heappop(ready)
            self.nodes.append(node)
            for user in users[node]:
                left[user] -= 1
                if not left[user]:
                    heapq.heappush(ready, (self._at(user), numbers[user], user))
        if len(self.nodes) == len(needs):
            return None
        stuck = [node for node in needs if left[node] and isinstance(node, Group)]
        assert stuck, "loops and what is made of rows only wait for what the step has before them"
        return set(min(stuck, key=self._at).equations)

    def _at(self, node: Node) -> int:
        """Where in the step a node is: after the last of what it stands for."""
        makers = self._stacks.makers
        if isinstance(node, Loop):
            return node.body.run.last - 1
        if isinstance(node, Stack):
            return max(
                (makers.get(row, (-1, 0))[0] for row in node.rows if isinstance(row, Value)), default=-1
            )
        equations = node.equations if isinstance(node, Group) else (node,)
        return max(makers[equation.outputs[0]][0] for equation in equations)

    # Code

    def written(self) -> Written:
        graph, stacks = self._stacks.graph, self._stacks
        given: dict[int, Stack] = {}
        rows: dict[int, tuple[int, ...]] = {}
        within: set[int] = set()
        position = {value: i for i, value in enumerate(graph.inputs)}
        for stack in stacks.all:
            if isinstance(stack.source, Given):
                places = tuple([position[row] for row in stack.rows if isinstance(row, Value)])
                given[min(places)], rows[min(places)] = stack, places
                within.update(places)
        starts = [i for i in range(len(graph.inputs)) if i in rows or i not in within]
        inputs = tuple([rows.get(i, (i,)) for i in starts])
        into = [given.get(i) or graph.inputs[i] for i in starts]

        def run(*flat: Any) -> list[Any]:
            known = self._ref, self._totals, self._shared, self._wanted
            running = _Running(stacks, self._primitives, *known)
            for where, array in zip(into, flat, strict=True):
                running.put(where, array)
            for value, array in graph.constants.items():
                running.put(value, jnp.asarray(array))
            for node in self.nodes:
                running.do(node)
            return [running.get(ref) for _, ref in self._ends]

        counts = {loop.family: loop.body.run.times for loop in stacks.loops}
        return Written(
            tuple(counts.values()),
            inputs,
            tuple([places for places, _ in self._ends]),
            run,
        )


class _Running:
    """What was made so far, of a step that is being traced."""

    def __init__(
        self,
        stacks: Stacks,
        primitives: Mapping[str, Any],
        ref: Callable[[Atom], _Ref],
        totals: Mapping[Equation, Total | None],
        shared: Callable[[Loop], Iterator[tuple[int, int, Atom]]],
        wanted: Mapping[Loop, list[Stack]],
    ) -> None:
        self._stacks, self._primitives, self._ref = stacks, primitives, ref
        self._totals, self._shared, self._wanted = totals, shared, wanted
        self._env: dict[Value | Stack | _Last | _Row, Any] = {}

    def put(self, where: Value | Stack | _Last, array: Any) -> None:
        self._env[where] = array

    def get(self, ref: _Ref) -> Any:
        if isinstance(ref, Literal):
            return _number(ref)
        if isinstance(ref, _Row) and ref not in self._env:
            self._env[ref] = self._env[ref.stack][ref.layer]
        return self._env[ref]

    def _of(self, atom: Atom) -> Any:
        return self.get(self._ref(atom))

    def do(self, node: Node) -> None:
        """Run what makes something."""
        if isinstance(node, Loop):
            self._loop(node)
        elif isinstance(node, Group):
            self._group(node)
        elif isinstance(node, Stack):
            self._env[node] = _stacked([self._of(row) for row in node.rows])
        else:
            total = self._totals.get(node)
            if total is None:
                results = results_of(node, self._primitives, [self._of(atom) for atom in node.inputs])
                self._env.update(zip(node.outputs, results, strict=True))
            else:
                self._env[node.outputs[0]] = self._total(node, total)

    def _total(self, equation: Equation, total: Total) -> Any:
        with as_traced(equation):
            # Of whole numbers jax.numpy makes wider sums.
            dtype = dtype_of(equation.output_types[0].dtype)
            stacks = (self._env[stack] for stack in total.stacks)
            found, *terms = [getattr(jnp, total.how)(stack, axis=0).astype(dtype) for stack in stacks]
            for term in (*terms, *map(self._of, total.rest)):
                found = self._primitives[equation.primitive].bind(found, term)
        return found

    def _group(self, group: Group) -> None:
        first = group.equations[0]
        axes = [0 if isinstance(operand, Stack) else None for operand in group.operands]
        args = [self._env[o] if isinstance(o, Stack) else self._of(o) for o in group.operands]

        def one(*args: Any) -> list[Any]:
            return results_of(first, self._primitives, args)

        results = jax.vmap(one, in_axes=axes)(*args)
        self._env.update(zip(self._stacks.made_by[group], results, strict=True))

    def _loop(self, loop: Loop) -> None:
        run, body, order = loop.body.run, loop.body, self._stacks.order
        positions = [p for p in range(run.period) if p not in body.once]
        shared = {(position, k): self._of(atom) for position, k, atom in self._shared(loop)}
        scanned = self._wanted.get(loop, [])
        places = list(loop.starts)

        def iteration(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            entering = dict(zip(places, carry, strict=True))
            own = dict(zip(loop.stacks, rows, strict=True))
            made: dict[Place, Any] = {}
            for position in positions:
                args: list[Any] = []
                for k, slot in enumerate(body.slots[position]):
                    if (position, k) in shared:
                        args.append(shared[position, k])
                    elif isinstance(slot, Rows):
                        args.append(own[slot.atoms])
                    else:
                        assert not isinstance(slot, Same), "it is shared"
                        args.append((made if isinstance(slot, Own) else entering)[slot.place])
                results = results_of(order[run.first + position], self._primitives, args)
                made.update({(position, k): result for k, result in enumerate(results)})
            outs: list[Any] = []
            for stack in scanned:
                assert isinstance(stack.source, Scanned)
                outs.append((entering if stack.source.entering else made)[stack.source.place])
            return [made[place] for place in places], outs

        start = [self._of(atom) for atom in loop.starts.values()]
        rows = [self._env[stack] for stack in loop.stacks.values()]
        with as_traced(order[run.first + positions[0]]):
            last, stacked = jax.lax.scan(iteration, start, rows, length=run.times, reverse=loop.reverse)
        self._env.update({_Last(loop, place): x for place, x in zip(places, last, strict=True)})
        self._env.update(zip(scanned, stacked, strict=True))


def _number(literal: Literal) -> Any:
    return np.asarray(literal.value, dtype_of(literal.type.dtype))


def _stacked(rows: Sequence[Any]) -> Any:
    return jnp.stack([jnp.asarray(row) for row in rows])
