"""An order of steps as one rank runs it: everything that can be settled before the first step is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.compile import Compiler, Device, Local
from shardwright.backends.direct import DirectExchanger
from shardwright.backends.faults import Watch, check_finite
from shardwright.backends.host_memory import to_device, to_host
from shardwright.backends.layout import holds, to_numpy
from shardwright.backends.local import filled, operand, written
from shardwright.backends.mpi.donated import given_away
from shardwright.backends.mpi.handing import handed_on
from shardwright.backends.mpi.moves import lowerings
from shardwright.backends.relay import Stage
from shardwright.backends.runner import iterate
from shardwright.backends.schedule.acts import Act, Land, Launch, Order, Repeat
from shardwright.backends.schedule.document import wire_type
from shardwright.backends.wire import to_jax, to_segment
from shardwright.backends.world import World
from shardwright.ir.carried import begun_with, carried_in_place, handed_over, olds, read_by, written_over
from shardwright.ir.flow import inputs, outputs
from shardwright.ir.graph import Atom, Equation, Literal, TensorType
from shardwright.ir.placement import Placement
from shardwright.ir.program import Property
from shardwright.ir.rules import Signature
from shardwright.ir.segments import Away, Back, Relay, Segment, with_host
from shardwright.ir.text import format_instruction
from shardwright.ir.trace import Traced

Env: TypeAlias = list[Any]
Do: TypeAlias = Callable[[Env], None]
Tick: TypeAlias = Callable[[int, int], None]


class MpiMachine:
    """What the scripts of one rank share.

    Args:
        traced: the training step.
        world: the ranks.
        watch: told where this rank is.
        finite: stop at the first step whose results are not all finite.
    """

    def __init__(self, traced: Traced, world: World, watch: Watch, *, finite: bool = False) -> None:
        self.world = world
        self.lane = world.lane
        self.watch = watch
        self.finite = finite
        self.device = Device(world.rank, world.ratios, traced.primitives, separate=True)
        self.compiler = Compiler()
        #: Seconds by what they were spent on, where somebody wants to know: steps then follow one another.
        self.spent: dict[str, float] | None = None

    def ready(self, value: Any) -> np.ndarray[Any, Any]:
        """A local array as numpy's, when it is there; exchanges under way go on meanwhile."""
        self.wait(value)
        return to_numpy(value)

    def wait(self, value: Any) -> None:
        """Until a local array is there; exchanges under way go on meanwhile."""
        if hasattr(value, "is_ready"):
            self.lane.beside(value.is_ready)
            # With nothing under way, it is left to XLA to wake this thread: it takes no core meanwhile.
            value.block_until_ready()

    def take(self, value: Any, iteration: int) -> Any:
        return jax.lax.dynamic_index_in_dim(value, iteration, keepdims=False)

    def rows(self, tensor: TensorType, placement: Placement) -> Any:
        return filled(tensor, self.device.shape(tensor, placement), 0)

    def put(self, rows: Sequence[Any], iteration: int, values: Sequence[Any]) -> list[Any]:
        return written(rows, iteration, values)

    def decide(self, value: Any) -> int:
        """Device 0 decides: where cards are unlike, a comparison may fall out differently on another."""
        decision = np.array([int(value)], np.int64)
        self.world.settle()
        self.world.wait([self.world.comm.Ibcast(decision, root=0)])
        return int(decision[0])


class Script:
    """Runs an order on one rank; a held value is its local array, None outside the value's group.

    Args:
        order: the steps.
        machine: this rank's.
        donated: inputs whose memory may be used again once they were read for the last time.
        body: whether it is that of a loop: loops in it may begin with such inputs in their place, too.
    """

    def __init__(
        self, order: Order, machine: MpiMachine, donated: Collection[Property] = (), *, body: bool = False
    ) -> None:
        order = replace(order, steps=with_host(order.steps, order.program, order.graph))
        self.order, self.machine = order, machine
        self.position = 0
        self._slots: dict[Property, int] = {}
        self._free = 0
        program, graph = order.program, order.graph
        self._inputs = [self._slot(prop) for prop in inputs(program, graph)]
        self._constants = [jnp.asarray(array) for array in graph.constants.values()]
        #: Of every loop its bodies, and the operands that these carry on in their place.
        self._loops = {step: self._carrying(step) for step in order.steps if isinstance(step, Repeat)}
        self.bodies = [body for bodies, _ in self._loops.values() for body in bodies]
        begun = {
            step: handed_over(order, step, kept) | begun_with(order, step, kept, donated if body else ())
            for step, (_, kept) in self._loops.items()
        }
        device = machine.device
        self._donated = given_away(order, donated, device.index, len(device.ratios), begun)
        self._functions: dict[Segment, Local] = {}
        self._stages: dict[Relay, Stage] = {}
        self._flights: dict[int, int] = {}
        #: What others than segments read, as JAX's arrays.
        self._arrays = {prop for step in order.steps if not isinstance(step, Segment) for prop in step.needs}
        self._arrays.update(outputs(program, graph))
        self._outputs = [self._reader(a, p) for a, p in zip(graph.outputs, program.outputs, strict=True)]
        self.steps: list[Do] = [self._step(step) for step in order.steps]

    def _slot(self, prop: Property) -> int:
        if prop not in self._slots:
            self._slots[prop] = self._free
            self._free += 1
        return self._slots[prop]

    def segments(self) -> int:
        """How many there are to compile, loop bodies included."""
        own = sum(isinstance(step, Segment | Relay) for step in self.order.steps)
        return own + sum(body.segments() for body in self.bodies)

    def compile(self, tick: Tick) -> None:
        """Compile all segments."""
        total, done = self.segments(), 0

        def one(script: Script) -> None:
            nonlocal done
            for step in script.order.steps:
                if isinstance(step, Segment):
                    script.machine.watch.compiling(script, step.first)
                    script._functions[step] = script.machine.compiler.ahead(
                        step, script.order.graph, script.machine.device, script._donated.get(step, ())
                    )
                elif isinstance(step, Relay):
                    script.machine.watch.compiling(script, step.first)
                    script._stages[step] = script._stage(step)
                else:
                    continue
                done += 1
                tick(done, total)
            for body in script.bodies:
                one(body)

        one(self)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Outputs from inputs, in the placements that the program gives them."""
        env: Env = [None] * self._free
        for slot, value in zip(self._inputs, (*args, *self._constants), strict=True):
            env[slot] = value
        del args
        watch, position = self.machine.watch, 0
        try:
            for position, step in enumerate(self.steps):
                watch.at = (self, position)
                step(env)
        except BaseException as error:
            error.add_note(self.describe(position))
            raise
        return [read(env) for read in self._outputs]

    def describe(self, position: int) -> str:
        """Which instruction a step is, in words."""
        step = self.order.steps[position]
        text = format_instruction(self.order.program, self.order.graph, step.first)
        return f"{'in the segment from' if isinstance(step, Segment) else 'at'} instruction {text}"

    # -- steps -------------------------------------------------------------------------------------

    def _step(self, step: Act) -> Do:
        if isinstance(step, Segment):
            do = self._segment(step)
        elif isinstance(step, Launch):
            do = self._launch(step)
        elif isinstance(step, Land):
            do = self._land(step)
        elif isinstance(step, Away):
            do = self._away(step)
        elif isinstance(step, Back):
            do = self._back(step)
        elif isinstance(step, Relay):
            do = self._relay(step)
        else:
            do = self._repeat(step)
        drops = [self._slot(prop) for prop in step.drops]
        gives = [(prop, self._slot(prop)) for prop in step.gives]
        machine = self.machine

        def checked(env: Env) -> None:
            do(env)
            if machine.finite:
                for prop, slot in gives:
                    check_finite(env[slot], f"%{prop.value}")
            for slot in drops:
                env[slot] = None

        return checked

    def _segment(self, step: Segment) -> Do:
        rank, machine = self.machine.device.index, self.machine
        needs = [self._slot(prop) for prop in step.needs if holds(prop, rank)]
        gives = [self._slot(prop) for prop in step.gives if holds(prop, rank)]
        functions = self._functions

        def run(env: Env) -> None:
            begin = time.perf_counter()
            for slot, result in zip(gives, functions[step](*[env[slot] for slot in needs]), strict=True):
                env[slot] = result
            if machine.spent is not None:
                jax.block_until_ready([env[slot] for slot in gives])
                _book(machine.spent, "segments", begin)

        return run

    def _launch(self, step: Launch) -> Do:
        message, machine = step.message, self.machine
        tensors = tuple(self.order.types[move.value] for move in message.moves)
        needs = [self._slot(prop) for prop in message.needs]
        self._flights[message.number] = flight = self._free
        self._free += 1
        move = message.moves[0]
        if (move.kind, move.strategy) in lowerings():
            world, (tensor,), (need,) = machine.world, tensors, needs
            world.join([move.group])

            def call(env: Env) -> None:
                machine.ready(env[need]) if env[need] is not None else None
                env[flight] = [world.by_function(move, tensor, env[need])]

            return call
        exchanger = machine.world.exchanger(message.moves, tensors)
        if exchanger is None:
            return lambda env: None
        nothing, direct = np.empty(0, wire_type(tensors[0])[1]), isinstance(exchanger, DirectExchanger)
        lane, name = machine.lane, f"{move.kind}.{move.strategy}"

        def start(env: Env) -> None:
            operands = [env[slot] for slot in needs]
            arrays = operands if direct else [nothing if v is None else machine.ready(v) for v in operands]
            begin = time.perf_counter()
            env[flight] = lane.launch(exchanger, arrays), operands
            if machine.spent is not None:
                _book(machine.spent, name, begin)

        return start

    def _land(self, step: Land) -> Do:
        message, machine = step.message, self.machine
        tensors = tuple(self.order.types[move.value] for move in message.moves)
        gives = [self._slot(prop) for prop in message.gives]
        flight, move = self._flights[message.number], message.moves[0]
        if (move.kind, move.strategy) in lowerings():

            def put(env: Env) -> None:
                (env[gives[0]],) = env[flight]
                env[flight] = None

            return put
        exchanger = machine.world.exchanger(message.moves, tensors)
        if exchanger is None:
            return lambda env: None
        lane, same, name = machine.lane, exchanger.same, f"{move.kind}.{move.strategy}"
        dtypes, direct = [tensor.dtype for tensor in tensors], isinstance(exchanger, DirectExchanger)
        converts = [to_jax if prop in self._arrays else to_segment for prop in message.gives]

        def finish(env: Env) -> None:
            begin = time.perf_counter()
            running, operands = env[flight]
            env[flight] = None
            for slot, result, operand_, itself, convert, dtype in zip(
                gives, lane.land(running), operands, same, converts, dtypes, strict=True
            ):
                env[slot] = operand_ if itself else result if direct else convert(result, dtype)
            if machine.spent is not None:
                _book(machine.spent, name, begin)

        return finish

    def _away(self, step: Away) -> Do:
        """Tensors leave the device when they are there; only then what comes after takes their place."""
        slots, machine = [self._slot(prop) for prop in step.needs], self.machine

        def leave(env: Env) -> None:
            begin = time.perf_counter()
            for slot in slots:
                if env[slot] is not None:
                    machine.wait(env[slot])
                    env[slot] = to_host(env[slot])
            if machine.spent is not None:
                _book(machine.spent, "host memory", begin)

        return leave

    def _back(self, step: Back) -> Do:
        pairs = [
            (self._slot(source), self._slot(result), source in step.stayed)
            for source, result in zip(step.needs, step.gives, strict=True)
        ]
        machine = self.machine

        def come(env: Env) -> None:
            begin = time.perf_counter()
            for source, result, stayed in pairs:
                value = env[source]
                env[result] = value if stayed or value is None else to_device(value)
            if machine.spent is not None:
                jax.block_until_ready([env[result] for _, result, _ in pairs if env[result] is not None])
                _book(machine.spent, "host memory", begin)

        return come

    def _stage(self, step: Relay) -> Stage:
        """The layers of this rank, compiled."""
        equation, device = self.order.graph.equations[step.compute.equation], self.machine.device
        compiler = self.machine.compiler
        return Stage(equation, step.compute.signature, device.index, device.ratios, compiler, now=True)

    def _relay(self, step: Relay) -> Do:
        machine, stages, signature = self.machine, self._stages, step.compute.signature
        reads, gives = self._ends(self.order.graph.equations[step.compute.equation], signature)

        def relay(env: Env) -> None:
            begin = time.perf_counter()
            results = handed_on(stages[step], [read(env) for read in reads], machine.world, machine.ready)
            for slot, result in zip(gives, results, strict=True):
                env[slot] = result
            if machine.spent is not None:
                jax.block_until_ready(results)
                _book(machine.spent, "stages", begin)

        return relay

    def _repeat(self, step: Repeat) -> Do:
        machine = self.machine
        bodies, kept = self._loops[step]
        equation, signature = self.order.graph.equations[step.loop.equation], step.loop.signature
        reads, gives = self._ends(equation, signature)
        operands, begun = read_by(step, self.order.graph), self._donated[step]
        copied = [k for k in kept if operands[k] not in begun]

        def loop(env: Env) -> None:
            args = [read(env) for read in reads]
            for k in copied:
                args[k] = None if args[k] is None else jnp.copy(args[k])
            results = iterate(equation, signature, args, bodies, machine)
            for slot, result in zip(gives, results, strict=True):
                env[slot] = result

        return loop

    def _carrying(self, step: Repeat) -> tuple[list[Script], frozenset[int]]:
        """The bodies of a loop, and the positions of the operands that these carry on in their place."""
        equation = self.order.graph.equations[step.loop.equation]
        over = [written_over(body, equation, number) for number, body in enumerate(step.bodies)]
        pairs = zip(step.bodies, map(olds, over), strict=True)
        bodies = [Script(body, self.machine, mine, body=True) for body, mine in pairs]
        # Where a message carries it meanwhile, a segment takes no memory after all.
        taken = [set[Property]().union(*script._donated.values()) for script in bodies]
        return bodies, carried_in_place(step.bodies, equation, taken)

    def _ends(self, equation: Equation, signature: Signature) -> tuple[list[Callable[[Env], Any]], list[int]]:
        """What reads every operand of an equation, and the slots of its results."""
        ins = zip(equation.inputs, signature.ins, strict=True)
        outs = zip(equation.outputs, signature.outs, strict=True)
        return [self._reader(a, p) for a, p in ins], [self._slot(Property(v.index, p)) for v, p in outs]

    def _reader(self, atom: Atom, placement: Placement) -> Callable[[Env], Any]:
        if isinstance(atom, Literal):
            value = operand(atom, placement, self.machine.device.index)
            return lambda env: value
        slot = self._slot(Property(atom.index, placement))
        return lambda env: env[slot]


def _book(spent: dict[str, float], name: str, begin: float) -> None:
    spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin
