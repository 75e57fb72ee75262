"""What a rank does in a step, one act after another: the vocabulary of orders (`schedule/order.py`).

order ::= step*
step  ::= segment     instructions that every device runs alone, as one compiled function
        | launch      a message leaves: the exchanges in it are started
        | land        it has arrived: its results may be read
        | relay       layers as stages, which hand pieces of the batch on to each other
        | loop        a loop whose body exchanges: its orders, run iteration by iteration
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.program import Loop, Move, Program, Property
from shardwright.ir.segments import Away, Back, Relay, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Exchanges that travel together.

    Attributes:
        number: in the order of the whole step, loop bodies included.
        first: position of the first exchange in its program.
        positions: of all of them.
        moves: the exchanges, all by the strategy of the message.
        needs: operands, one per exchange.
        gives: results, one per exchange.
        after: numbers of messages of the same program whose results its operands were made from.
    """

    number: int
    first: int
    positions: tuple[int, ...]
    moves: tuple[Move, ...]
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A message leaves."""

    message: Message
    needs: tuple[Property, ...]
    gives: tuple[Property, ...] = ()
    drops: tuple[Property, ...] = ()

    @property
    def first(self) -> int:
        return self.message.first


@dataclass(frozen=True, slots=True, eq=False)
class Land:
    """A message has arrived."""

    message: Message
    gives: tuple[Property, ...]
    needs: tuple[Property, ...] = ()
    drops: tuple[Property, ...] = ()

    @property
    def first(self) -> int:
        return self.message.first


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A loop run by the host; `bodies` are in the order of the equation's regions."""

    first: int
    loop: Loop
    bodies: tuple[Order, ...]
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]
    drops: tuple[Property, ...] = ()


#: `Away` and `Back` are there once `segments.with_host` put them there.
Act: TypeAlias = Segment | Launch | Land | Relay | Repeat | Away | Back


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The steps of `program` over `graph`.

    Attributes:
        program: the plan's, but for exchanges that changed places with their readers (`ir/hoist.py`).
        graph: what it computes.
        steps: in the order in which they are run.
        types: global types of the graph's values by index.
        stood: positions that the program's instructions have in the plan's.
    """

    program: Program
    graph: Graph
    steps: tuple[Act, ...]
    types: Mapping[int, TensorType]
    stood: tuple[int, ...]

    def messages(self) -> Iterator[tuple[Order, Message]]:
        """All messages, those of loop bodies where the loop is, with the order that they are in."""
        for step in self.steps:
            if isinstance(step, Launch):
                yield self, step.message
            elif isinstance(step, Repeat):
                for body in step.bodies:
                    yield from body.messages()
