"""What instructions cost on two mesh axes; see `cost/grid/prices.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.grid.kernels import Kernels, KnownWays, Ways
from shardwright.cost.grid.prices import (
    FEATURES,
    ONE,
    Q2,
    R2,
    R_Q2,
    RQ,
    RQ2,
    WHOLE,
    GridCost,
    Mesh,
    Q,
    R,
    padded_rows,
)
from shardwright.cost.grid.stages import staged_kernels
from shardwright.cost.kernels.contractions import Sizes, even_share
from shardwright.cost.model import CostModel
from shardwright.cost.moves import STAGED, strategies
from shardwright.cost.share_cost import CostStack, Floats
from shardwright.cost.subfleet import subfleet
from shardwright.cost.topology import Topology
from shardwright.cost.traffic import ALIASES, Moved, Traffic
from shardwright.ir.collectives import Step, step
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import Placement, Shard, components, node_members
from shardwright.ir.registry import is_contraction
from shardwright.ir.rules import Rule, Signature, flop_count
from shardwright.ir.stages import layers_of


@dataclass(frozen=True, slots=True)
class _Across:
    """Exchanges between nodes.

    Attributes:
        topology: of the nodes, each as one device.
        class_of_kind: of every kind of node, its class there.
    """

    topology: Topology
    class_of_kind: NDArray[np.int64]


class GridModel:
    """Prices every instruction for one fleet of several nodes, in the fleet's device classes.

    Attributes:
        model: prices of the same fleet on one axis.
        mesh: the fleet by nodes.

    Args:
        model: prices of the fleet on one axis.
        ways: how signatures cut, which is the same on every fleet.
    """

    def __init__(self, model: CostModel, ways: KnownWays | None = None) -> None:
        self.model = model
        self._known_ways: KnownWays = {} if ways is None else ways
        self.mesh = Mesh.of(model)
        self._moves: dict[tuple[object, ...], GridCost] = {}
        self._supported: dict[tuple[object, ...], tuple[str, ...]] = {}
        #: Fleets of the axes, where links are as the fleet says whatever is exchanged.
        self._within_axis: tuple[Topology, ...] | None = None
        self._across_axis: dict[bool, _Across] = {}
        self._cut: dict[int, tuple[Ways, list[tuple[tuple[Signature, float], ...]]]] = {}
        self._free = GridCost(np.zeros((FEATURES, 1, len(self.model.classes))))
        self._overlaps = _overlaps(self.mesh.nodes)

    # -- kernels -----------------------------------------------------------------------------------

    def kernels(
        self, equation: Equation, rule: Rule, found: Sequence[Signature], traffic: Traffic
    ) -> Kernels:
        """Costs and cuts of one equation under each of its signatures."""
        if equation.primitive in ALIASES:
            return Kernels(self._free.terms[None], (WHOLE,), np.zeros(len(found), dtype=np.intp))
        if layers_of(equation) is not None:
            return staged_kernels(equation, found, self.model, len(self.mesh.nodes), self._handed_s)
        tensors = (*equation.input_types, *equation.output_types)
        product = is_contraction(equation.primitive)
        ways = self._ways(tensors, traffic.moved(equation), found, product)
        # How a product is cut makes its parts faster or slower; of all else only there is less.
        cuts = self._cut_in(ways, tensors) if product else [()]
        seconds = self.model.arithmetic_s(equation, flop_count(rule, equation), cuts)
        return Kernels(ways.terms(seconds, *self.model.overheads(equation, traffic)), ways.cuts, ways.at)

    def learn(self, wanted: Iterable[tuple[Equation, Rule, Sequence[Signature], Traffic]]) -> None:
        """Price the products among some equations ahead, under all of their signatures, in one go."""
        shapes: dict[tuple[str, bool], list[Sizes]] = {}
        for equation, rule, found, traffic in wanted:
            if is_contraction(equation.primitive):
                tensors = (*equation.input_types, *equation.output_types)
                ways = self._ways(tensors, traffic.moved(equation), found, product=True)
                cuts = self._cut_in(ways, tensors)
                products = self.model.products_in(equation, flop_count(rule, equation), cuts)
                if products is not None:
                    shapes.setdefault(products[0], []).extend(products[1])
        self.model.learn(shapes)

    def _cut_in(
        self, ways: Ways, tensors: tuple[TensorType, ...]
    ) -> list[tuple[tuple[Signature, float], ...]]:
        """Of every way to cut a product, what `_cuts` says."""
        key = id(ways)
        if key not in self._cut:
            # What is remembered by identity is kept, lest something else comes to have it.
            self._cut[key] = ways, [self._cuts(axes, tensors) for axes in ways.axes]
        return self._cut[key][1]

    def _ways(
        self,
        tensors: tuple[TensorType, ...],
        moved: Moved,
        found: Sequence[Signature],
        product: bool,
    ) -> Ways:
        if len(found) == 1:  # of a program: what it asks for is made for it
            return Ways.of(tensors, moved, found, product)
        key = id(found), tensors, moved, product
        if key not in self._known_ways:
            # What is remembered by identity is kept, lest something else comes to have it.
            self._known_ways[key] = found, Ways.of(tensors, moved, found, product)
        return self._known_ways[key][1]

    def _cuts(
        self, axes: Sequence[Signature], tensors: Sequence[TensorType]
    ) -> tuple[tuple[Signature, float], ...]:
        """A signature on each of its axes, with the even share of its devices."""
        if len(axes) == 1:  # R and Partial, on all devices alike
            return ((axes[0], 1.0),)
        nodes = len(self.model.fleet.nodes)
        devices = (nodes, max(1, round(len(self.model.class_of) / nodes)))
        shares = [
            even_share(tuple(tensors), (*one.ins, *one.outs), count)
            for one, count in zip(axes, devices, strict=True)
        ]
        return tuple(zip(axes, shares, strict=True))

    def _handed_s(self, nbytes: int) -> Floats:
        """Seconds in which all devices of a node hand on so many bytes each to the next node, by class."""
        entry, nodes = (
            strategies()["send", "direct"],
            self._between("send", "direct", nbytes, by_leaders=False),
        )
        devices = np.bincount(self.mesh.kind_of, self.mesh.inside).astype(np.int64)
        links = entry.transfers(nodes.topology, [count * nbytes for count in devices.tolist()])
        by_kind = links.constant.max(axis=1)[np.arange(len(devices)), nodes.class_of_kind]
        host, copies = self.model.topology, sum(STAGED["send"])
        return by_kind[self.mesh.kind_of] + copies * (host.host_latency_s + nbytes * host.host_s_per_byte)

    # -- moves -------------------------------------------------------------------------------------

    def strategies(self, kind: str, pre: Placement, post: Placement) -> tuple[str, ...]:
        """The strategies of a move that make sense on its axis; there is one at least."""
        found = _step(pre, post)
        if collectives()[kind].local:
            return collectives()[kind].strategies
        if found.axis == "all":
            return self.model.strategies(kind, found.pre, found.post)
        key = (kind, found.axis, _by_leaders(pre))
        if key not in self._supported:
            self._supported[key] = tuple(
                name
                for name in collectives()[kind].strategies
                if all(
                    strategies()[kind, name].supported(topology)
                    for topology in (
                        self._insides(kind, name, 0)
                        if found.axis == "within"
                        else [self._between(kind, name, 0, by_leaders=_by_leaders(pre)).topology]
                    )
                    if topology.devices > 1
                )
            )
        return self._supported[key]

    def what(self, kind: str, pre: Placement, post: Placement) -> tuple[object, ...]:
        """What a move's price depends on besides its strategy and the bytes of the tensor."""
        if collectives()[kind].local:
            return ("free",)
        found = _step(pre, post)
        if found.axis == "all":
            return kind, found.axis, found.pre, found.post
        # On one of the axes it does not matter which dimensions are cut, but whether the other axis cuts any.
        across, within = components(pre)
        return kind, found.axis, isinstance(across if found.axis == "within" else within, Shard)

    def move(self, kind: str, strategy: str, tensor: TensorType, pre: Placement, post: Placement) -> GridCost:
        """Cost of one move of a tensor: on its axis, what the strategy costs on that axis' own fleet."""
        key = (*self.what(kind, pre, post), strategy, tensor.nbytes)
        if key not in self._moves:
            self._moves[key] = GridCost(self.moves(kind, strategy, [tensor.nbytes], pre, post)[0])
        return self._moves[key]

    def moves(
        self, kind: str, strategy: str, nbytes: Sequence[int], pre: Placement, post: Placement
    ) -> Floats:
        """Costs of one move of many tensors, (tensors, features, rows, classes); see `GridCost`."""
        if collectives()[kind].local:
            return np.repeat(self._free.terms[None], len(nbytes), axis=0)
        # Where links were measured, other bytes may mean other links.
        alike = [[each] for each in nbytes] if self.model.fleet.fitted else [list(nbytes)]
        found = _step(pre, post)
        across, within = (isinstance(p, Shard) for p in components(pre))
        if found.axis == "all":
            classes = np.arange(len(self.model.classes))
            cost = self.model.exchanges(kind, strategy, nbytes)
            return _placed(self._nothing(len(nbytes)), classes, cost, ONE, RQ, RQ2)
        if found.axis == "within":
            priced = [self._within(kind, strategy, each, across) for each in alike]
        else:
            priced = [self._across(kind, strategy, each, not within) for each in alike]
        return np.concatenate(priced)

    def _nothing(self, tensors: int) -> Floats:
        return np.zeros((tensors, FEATURES, 1, len(self.model.classes)))

    def _within(self, kind: str, strategy: str, nbytes: Sequence[int], of_share: bool) -> Floats:
        """Of what a node has: all of the tensor, or its share; what grows with bytes then grows with r."""
        entry, mesh = strategies()[kind, strategy], self.mesh
        terms = self._nothing(len(nbytes))
        for number, topology in enumerate(self._insides(kind, strategy, nbytes[0])):
            mine = np.flatnonzero(mesh.kind_of == number)
            if topology.devices == 1:
                continue
            whole = entry.prices(topology, nbytes, topology.classes)
            if not of_share:
                terms = _placed(terms, mine, whole, ONE, Q, Q2)
                continue
            nothing = entry.prices(topology, [0], topology.classes)
            terms = _placed(terms, mine, nothing, ONE, Q, Q2)
            grows = CostStack(
                whole.constant - nothing.constant,
                whole.linear - nothing.linear,
                whole.product - nothing.product,
            )
            terms = _placed(terms, mine, grows, R, RQ, R_Q2)
        return terms

    def _across(self, kind: str, strategy: str, nbytes: Sequence[int], by_leaders: bool) -> Floats:
        """All devices of a node at once, each with its stretch; or a leader that hands on what it gets."""
        entry, mesh = strategies()[kind, strategy], self.mesh
        nodes = self._between(kind, strategy, nbytes[0], by_leaders=by_leaders)
        links = entry.transfers(nodes.topology, nbytes)
        of_kind = nodes.class_of_kind[mesh.kind_of]
        columns = CostStack(*(each[..., of_kind] for each in (links.constant, links.linear, links.product)))
        terms = _placed(self._nothing(len(nbytes)), np.arange(len(of_kind)), columns, ONE, R, R2)
        # Nodes of unequal size cut a tensor at different points: one exchange per stretch between them.
        if not by_leaders:
            latency = entry.transfer(nodes.topology, 0).constant.max(axis=0)[of_kind]
            terms[:, ONE] += (self._overlaps - 1) * latency
        # Staging: a device hands its own stretch to the host, a leader all.
        whole, part = STAGED.get(kind, (2, 0))
        flat = self.model.topology
        copy = np.array(nbytes, dtype=np.float64)[:, None, None] * flat.host_s_per_byte
        terms[:, ONE] += (whole + part) * flat.host_latency_s
        terms[:, ONE if by_leaders else Q] += whole * copy
        terms[:, R if by_leaders else RQ] += part * copy
        if by_leaders:
            self._hand_on(kind, nbytes, terms)
        return terms

    def _hand_on(self, kind: str, nbytes: Sequence[int], terms: Floats) -> None:
        """Add what it takes to broadcast the result in every node, by the strategy that suits it best."""
        names = collectives()["broadcast"].strategies
        # Of a reduce-scatter and an all-to-all the result is the node's share of the tensor.
        feature = R if kind in ("reduce_scatter", "all_to_all") else ONE
        insides = [self._insides("broadcast", name, nbytes[0]) for name in names]
        for number, inside in enumerate(zip(*insides, strict=True)):
            mine = np.flatnonzero(self.mesh.kind_of == number)
            if inside[0].devices == 1:
                continue
            each = [
                strategies()["broadcast", name].prices(topology, nbytes, topology.classes)
                for name, topology in zip(names, inside, strict=True)
            ]
            seconds = np.stack([price.constant.max(axis=1) for price in each])
            best = seconds.max(axis=2).argmin(axis=0)
            terms[:, feature, :, mine] += seconds[best, np.arange(len(nbytes))].T[:, :, None]

    # -- the fleets of the axes ----------------------------------------------------------------------

    def _insides(self, kind: str, strategy: str, nbytes: int) -> tuple[Topology, ...]:
        """Of each kind of node alone."""
        fleet = self._under(kind, strategy, nbytes)
        if fleet is not self.model.fleet:
            return self._insides_of(fleet)
        if self._within_axis is None:
            self._within_axis = self._insides_of(fleet)
        return self._within_axis

    def _between(self, kind: str, strategy: str, nbytes: int, *, by_leaders: bool) -> _Across:
        """Of the nodes, each as one device."""
        fleet = self._under(kind, strategy, nbytes)
        if fleet is not self.model.fleet:
            return self._between_of(fleet, by_leaders)
        if by_leaders not in self._across_axis:
            self._across_axis[by_leaders] = self._between_of(fleet, by_leaders)
        return self._across_axis[by_leaders]

    def _under(self, kind: str, strategy: str, nbytes: int) -> Fleet:
        """The fleet as a strategy finds it: itself, unless that was measured."""
        return self.model.fleet.under(f"{kind}.{strategy}", nbytes)

    def _insides_of(self, fleet: Fleet) -> tuple[Topology, ...]:
        members = node_members(self.mesh.nodes)
        nodes = [members[self._node_of_kind(kind)] for kind in range(len(self.mesh.kind_counts))]
        return tuple(
            Topology.of(subfleet(fleet, node, f"node of kind {kind}")) for kind, node in enumerate(nodes)
        )

    def _between_of(self, fleet: Fleet, by_leaders: bool) -> _Across:
        nodes = replace(fleet, nodes=tuple(_as_device(n, fleet, by_leaders) for n in fleet.nodes))
        # Kinds of nodes that differ in other things alone are of one class here.
        class_of_node = {d: c.index for c in nodes.classes for d in c.members}
        firsts = [self._node_of_kind(number) for number in range(len(self.mesh.kind_counts))]
        return _Across(Topology.of(nodes), np.array([class_of_node[n] for n in firsts], dtype=np.int64))

    def _node_of_kind(self, number: int) -> int:
        """The first node of a kind."""
        return int(self.mesh.node_of[np.flatnonzero(self.mesh.kind_of[self.mesh.class_of] == number)[0]])


def _as_device(node: Node, fleet: Fleet, by_leader: bool) -> Node:
    """A node that talks to others as one device: through all of its rails, or through its leader's alone."""
    uplink = node.uplink or fleet.network
    used = 1 if by_leader else min(node.rails, len(node.devices))
    if uplink is not None and used > 1:
        uplink = Link(uplink.bandwidth_byte_per_s * used, uplink.latency_s, uplink.strategies)
    return replace(
        node, devices=node.devices[:1], link=None, uplink=uplink, rails=1, host_links=node.host_links[:1]
    )


def _overlaps(nodes: Sequence[int]) -> int:
    """Most stretches into which the cuts of all nodes divide what one device has, at even shares."""
    points = {Fraction(i, size) for size in nodes for i in range(size + 1)}
    pieces = [
        sum(Fraction(i, size) < point < Fraction(i + 1, size) for point in points) + 1
        for size in set(nodes)
        for i in range(size)
    ]
    return max(pieces)


def _step(pre: Placement, post: Placement) -> Step:
    found = step(pre, post)
    assert found is not None, f"no single move turns {pre} into {post}"
    return found


def _by_leaders(placement: Placement) -> bool:
    """Whether an exchange across the nodes is of what every device of a node has whole."""
    return not isinstance(components(placement)[1], Shard)


def _placed(
    terms: Floats, mine: NDArray[np.intp], costs: CostStack, constant: int, linear: int, product: int
) -> Floats:
    """`terms` of many instructions with those of costs of some classes added."""
    rows = max(terms.shape[2], costs.constant.shape[1])
    terms = padded_rows(terms, rows)
    for feature, array in ((constant, costs.constant), (linear, costs.linear), (product, costs.product)):
        terms[:, feature, :, mine] += np.moveaxis(padded_rows(array, rows), 2, 0)
    return terms
