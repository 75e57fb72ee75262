"""Values of one kind, one per layer, as one value with a dimension for the layers in front.

A stack is made where something wants one: the loop over layers, of parameters or of what the forward part
kept; or an equation that is there once for each layer, as the optimizer's are. Such equations become one on
stacks, and what these read becomes stacks in turn, up to the step's arguments.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence

from shardwright.ir.graph import Atom, Equation, Graph, Literal, Value
from shardwright.ir.rolling.parts import Given, Group, Joined, Loop, Mapped, Scanned, Source, Stack
from shardwright.ir.rolling.runs import kind, makers_of
from shardwright.ir.rolling.slots import Place, equal

#: Of many of these keys at once JAX draws what it draws of each alone; not so of keys of other generators.
_ALIKE_AT_ONCE = "key<fry>"


class Stacks:
    """The stacks of a step.

    Args:
        graph: the step.
        order: its equations, in the order that loops refer to.
        alike: atoms that stand for others which are equal.
        sorts: of every argument of the step: those of different sorts are never rows of one stack.
        single: equations that are to be in no group.
    """

    def __init__(
        self,
        graph: Graph,
        order: Sequence[Equation],
        alike: Mapping[Atom, Atom],
        sorts: Sequence[Hashable],
        single: Collection[Equation] = (),
    ) -> None:
        self.graph, self.order, self._alike = graph, order, dict(alike)
        self.makers = makers_of(order)
        self.loops: list[Loop] = []
        #: By value, the stack that it is a row of, and which.
        self.row_of: dict[Value, tuple[Stack, int]] = {}
        #: By equation, the group that it is in.
        self.group_of: dict[Equation, Group] = {}
        #: By group, a stack of each of its results.
        self.made_by: dict[Group, list[Stack]] = {}
        #: Equations that are of no group: what adds up numbers of all layers, for one.
        self.single = set(single)
        self._kinds: dict[Equation, Hashable] = {}
        self._loop_at: dict[int, Loop] = {}
        self._joined: dict[tuple[Atom, ...], Stack] = {}
        self.entering: dict[tuple[Atom, ...], tuple[Loop, Place]] = {}
        self._scanned: dict[tuple[int, Place, bool], Stack] = {}
        self._inputs = {value: i for i, value in enumerate(graph.inputs)}
        self._sorts = sorts
        self._trying: set[Equation] = set()
        #: Every stack, in the order in which they were made.
        self.all: list[Stack] = []

    # What is known of atoms

    def same(self, atom: Atom) -> Atom:
        """What stands for an atom."""
        return self._alike.get(atom, atom)

    def loop_of(self, atom: Atom) -> tuple[Loop, Place, int] | None:
        """The loop that makes a value, where in its body, and in which iteration."""
        at, result = self.makers.get(atom, (-1, 0)) if isinstance(atom, Value) else (-1, 0)
        loop = self._loop_at.get(at)
        if loop is None:
            return None
        iteration, position = divmod(at - loop.body.run.first, loop.body.run.period)
        return None if position in loop.body.once else (loop, (position, result), iteration)

    def place_of(self, atom: Atom) -> tuple[object, int, int] | None:
        """What an atom is a row of, as something to compare; its family, and its layer."""
        made = self.loop_of(atom)
        if made is not None:
            loop, place, iteration = made
            return (id(loop), place), loop.family, loop.layers[iteration]
        known = self.row_of.get(atom) if isinstance(atom, Value) else None
        if known is None:
            return None
        stack, layer = known
        return id(stack), stack.family, layer

    def is_plain(self, equation: Equation) -> bool:
        """Whether an equation is in no loop and no group."""
        at, _ = self.makers[equation.outputs[0]] if equation.outputs else (-1, 0)
        return at not in self._loop_at and equation not in self.group_of

    # Loops

    def add(self, loop: Loop) -> None:
        """A loop, after all that come before it; what it has for every layer becomes stacks."""
        body, run = loop.body, loop.body.run
        self.loops.append(loop)
        for at in range(run.first, run.last):
            self._loop_at[at] = loop
        for position in body.once:
            first, *others = run.at(position, self.order)
            for other in others:
                self._alike.update(zip(other.outputs, first.outputs, strict=True))
        for place in loop.starts:
            self.entering[self._rows(loop, place, entering=True)] = loop, place
        for atoms in body.rows:
            stack = self.stacked(loop.by_layer(atoms), loop.family, join=True)
            assert stack is not None, "what is no stack is joined to one"
            loop.stacks[atoms] = stack

    def scanned(self, loop: Loop, place: Place, *, entering: bool = False) -> Stack:
        """What a loop makes in every iteration, or what comes into it in its place, as a stack."""
        key = id(loop), place, entering
        if key not in self._scanned:
            rows = self._rows(loop, place, entering=entering)
            self._scanned[key] = self._made(rows, Scanned(loop, place, entering), loop.family)
        return self._scanned[key]

    def _rows(self, loop: Loop, place: Place, *, entering: bool = False) -> tuple[Atom, ...]:
        """The same as single values, by layer."""
        position, result = place
        made: list[Atom] = [e.outputs[result] for e in loop.body.run.at(position, self.order)]
        return loop.by_layer([loop.starts[place], *made[:-1]] if entering else made)

    # Stacks

    def stacked(self, atoms: tuple[Atom, ...], family: int, *, join: bool) -> Stack | None:
        """Atoms, one per layer, as a stack; None if they are none, and are not to be put together."""
        atoms = tuple([self.same(atom) for atom in atoms])
        first = self._together(atoms, family)
        if first is not None:
            return first
        entering = self.entering.get(atoms) or self._shifted(atoms)
        if entering is not None and entering[0].family == family:
            return self.scanned(*entering, entering=True)
        if all(isinstance(atom, Value) for atom in atoms):
            values = [atom for atom in atoms if isinstance(atom, Value)]
            if self._are_arguments(values):
                return self._made(atoms, Given(), family)
            group = self._grouped(values, family)
            if group is not None:
                return group
        if not join and not all(isinstance(a, Literal) or a in self.graph.constants for a in atoms):
            return None
        if atoms not in self._joined:
            self._joined[atoms] = self._made(atoms, Joined(), family)
        return self._joined[atoms]

    def _shifted(self, atoms: tuple[Atom, ...]) -> tuple[Loop, Place] | None:
        """A loop and a place where it makes atoms for the iteration after: it has to hand them on, then."""
        for ordered in (atoms, tuple(reversed(atoms))):
            made = self.loop_of(ordered[1])
            if made is None:
                continue
            loop, place, _ = made
            run = loop.body.run
            wanted = [(loop, place, n) for n in range(len(atoms) - 1)]
            known = place in loop.starts and loop.starts[place] is not ordered[0]
            at, _ = self.makers.get(ordered[0], (-1, 0)) if isinstance(ordered[0], Value) else (-1, 0)
            aligned = loop.by_layer(ordered) == atoms and len(atoms) == run.times
            if aligned and not known and at < run.first and list(map(self.loop_of, ordered[1:])) == wanted:
                loop.starts[place] = ordered[0]
                self.entering[atoms] = loop, place
                return loop, place
        return None

    def _made(self, rows: tuple[Atom, ...], source: Source, family: int) -> Stack:
        stack = Stack(rows, source, family)
        if isinstance(source, Given | Mapped):
            for layer, value in enumerate(rows):
                if isinstance(value, Value):
                    self.row_of[value] = stack, layer
        self.all.append(stack)
        return stack

    def _together(self, atoms: Sequence[Atom], family: int) -> Stack | None:
        """The stack that has these rows, in this order."""
        places = [self.place_of(atom) for atom in atoms]
        if places[0] is None:
            return None
        what, _, _ = places[0]
        if places != [(what, family, layer) for layer in range(len(atoms))]:
            return None
        made = self.loop_of(atoms[0])
        if made is not None:
            return self.scanned(made[0], made[1])
        assert isinstance(atoms[0], Value)
        stack, _ = self.row_of[atoms[0]]
        return stack if len(stack.rows) == len(atoms) else None

    def _are_arguments(self, values: Sequence[Value]) -> bool:
        """Whether values are arguments of one type, each once, that can be passed as one."""
        places = [self._inputs[value] for value in values if value in self._inputs]
        if len(set(places)) < len(values):
            return False
        if any(value in self.row_of or value.type != values[0].type for value in values):
            return False
        return len({self._sorts[place] for place in places}) == 1

    # Equations

    def _grouped(self, values: Sequence[Value], family: int) -> Stack | None:
        """Values that equations of one kind make, these equations being one on stacks."""
        made = [self.makers.get(value) for value in values]
        if any(m is None for m in made):
            return None
        equations = [self.order[at] for at, _ in (m for m in made if m is not None)]
        results = {result for _, result in (m for m in made if m is not None)}
        if len(results) > 1:
            return None
        group = self.group(equations, family)
        return None if group is None else self.row_of[group.equations[0].outputs[results.pop()]][0]

    def kind(self, equation: Equation) -> Hashable:
        """What an equation does, see `runs.kind`."""
        if equation not in self._kinds:
            self._kinds[equation] = kind(equation)
        return self._kinds[equation]

    def group(self, equations: Sequence[Equation], family: int) -> Group | None:
        """Equations, one per layer, as one on stacks, if they are of one kind and their operands can be."""
        first = equations[0]
        if len(set(equations)) < len(equations) or any(self.kind(e) != self.kind(first) for e in equations):
            return None
        for equation in equations:
            taken = equation in self._trying or equation in self.single
            if taken or not self.is_plain(equation) or _draws_alone(equation):
                return None
        self._trying.update(equations)
        begun = len(self.all)
        operands: list[Stack | Atom] = []
        for atoms in zip(*[equation.inputs for equation in equations], strict=True):
            operand = self._operand(tuple([self.same(atom) for atom in atoms]), family)
            if operand is None:
                break
            operands.append(operand)
        self._trying.difference_update(equations)
        stacks = sum(isinstance(operand, Stack) for operand in operands)
        if len(operands) < len(first.inputs) or not stacks:
            self._forget(begun)
            return None
        group = Group(tuple(equations), tuple(operands))
        self.group_of.update(dict.fromkeys(equations, group))
        self.made_by[group] = [
            self._made(tuple([e.outputs[result] for e in equations]), Mapped(group), family)
            for result in range(len(first.outputs))
        ]
        return group

    def _operand(self, atoms: tuple[Atom, ...], family: int) -> Stack | Atom | None:
        first = atoms[0]
        if all(equal(atom, first) for atom in atoms):
            return first
        return self.stacked(atoms, family, join=False)

    def _forget(self, begun: int) -> None:
        """Take back the stacks that were made since then."""
        for stack in self.all[begun:]:
            for row in stack.rows:
                if isinstance(row, Value) and self.row_of.get(row, (None, 0))[0] is stack:
                    del self.row_of[row]
            if isinstance(stack.source, Mapped):
                self.made_by.pop(stack.source.group, None)
                for equation in stack.source.group.equations:
                    self.group_of.pop(equation, None)
            if isinstance(stack.source, Joined):
                self._joined.pop(stack.rows, None)
            if isinstance(stack.source, Scanned):
                source = stack.source
                self._scanned.pop((id(source.loop), source.place, source.entering), None)
        del self.all[begun:]

    def _merge(self) -> None:
        """Of equations beside loops that do the same, the first stands for the others."""
        known: dict[Hashable, Equation] = {}
        for equation in self.order:
            if self.is_plain(equation):
                atoms = [self.same(atom) for atom in equation.inputs]
                what = tuple([(str(a), a.type) if isinstance(a, Literal) else id(a) for a in atoms])
                first = known.setdefault((self.kind(equation), what), equation)
                if first is not equation:
                    self._alike.update(zip(equation.outputs, first.outputs, strict=True))

    def spread(self) -> None:
        """Make what equations do with every row of a stack one equation on it, and so on."""
        self._merge()
        users: dict[Atom, list[tuple[Equation, int]]] = defaultdict(list)
        for equation in self.order:
            if self.is_plain(equation):
                for slot, atom in enumerate(equation.inputs):
                    if isinstance(atom, Value):
                        users[self.same(atom)].append((equation, slot))
        for loop in self.loops:
            for rows in self._read_rows(loop, users):
                self._with_users(rows, users, loop.family)
        at = 0
        while at < len(self.all):
            stack = self.all[at]
            at += 1
            if not isinstance(stack.source, Scanned):
                self._with_users(stack.rows, users, stack.family)

    def _read_rows(
        self, loop: Loop, users: Mapping[Atom, Sequence[tuple[Equation, int]]]
    ) -> list[tuple[Atom, ...]]:
        """What a loop makes and something reads, of every iteration, by layer."""
        run, found = loop.body.run, list[tuple[Atom, ...]]()
        for position in range(run.period):
            for result in range(len(self.order[run.first + position].outputs)):
                rows = self._rows(loop, (position, result))
                if all(users.get(row) for row in rows):
                    found.append(rows)
        return found

    def _with_users(
        self, rows: Sequence[Atom], users: Mapping[Atom, Sequence[tuple[Equation, int]]], family: int
    ) -> None:
        """Make what is done with every one of some rows one equation each."""
        seen: list[dict[Hashable, Equation]] = []
        for row in rows:
            times, mine = Counter[Hashable](), dict[Hashable, Equation]()
            for equation, slot in users.get(self.same(row), ()):
                what = self.kind(equation), slot
                mine[what, times[what]] = equation
                times[what] += 1
            seen.append(mine)
        for what in seen[0]:
            equations = [mine[what] for mine in seen if what in mine]
            if len(equations) == len(rows) and all(map(self.is_plain, equations)):
                self.group(equations, family)


def _draws_alone(equation: Equation) -> bool:
    """Whether an equation, or one inside of it, draws other numbers if it is one on stacks."""
    inside = (e for region in equation.regions for e in region.all_equations())
    return any(map(_draws_otherwise, (equation, *inside)))


def _draws_otherwise(equation: Equation) -> bool:
    if not equation.primitive.startswith("random_"):
        return equation.primitive.startswith("rng_")
    dtypes = (atom.type.dtype for atom in (*equation.inputs, *equation.outputs))
    return any(dtype.startswith("key<") and dtype != _ALIKE_AT_ONCE for dtype in dtypes)
