"""What instructions cost on two mesh axes, and prices at settled ratios; see `cost/grid/prices.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Pricing
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.grid.prices import (
    FEATURES,
    ONE,
    Q2,
    R2,
    R_Q2,
    RQ,
    RQ2,
    GridCost,
    GridCut,
    GridShares,
    Mesh,
    Q,
    R,
    padded_rows,
)
from shardwright.cost.kernels.contractions import even_share, sharded_size
from shardwright.cost.lines import ALIASES, Traffic
from shardwright.cost.model import CostModel
from shardwright.cost.moves import STAGED, strategies
from shardwright.cost.share_cost import Floats, ShareCost
from shardwright.cost.subfleet import subfleet
from shardwright.cost.topology import Topology
from shardwright.ir.collectives import Step, step
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import Placement, Shard, components, node_members
from shardwright.ir.program import Program, nodes_of
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import Rule, Signature, flop_count, on_axes

#: How an instruction cuts: its cut, of each tensor whether across and within, of a product which size.
_Way: TypeAlias = tuple[GridCut, tuple[int, ...], tuple[int | None, ...]]

#: By the id of signatures (kept with them), the tensors, and whether they are of a product.
Ways: TypeAlias = dict[tuple[int, tuple[TensorType, ...], bool], tuple[Sequence[Signature], list[_Way]]]


class GridModel:
    """Prices every instruction for one fleet of several nodes, in the fleet's device classes.

    Attributes:
        model: prices of the same fleet on one axis.
        mesh: the fleet by nodes.

    Args:
        model: prices of the fleet on one axis.
        ways: how signatures cut, which is the same on every fleet.
    """

    def __init__(self, model: CostModel, ways: Ways | None = None) -> None:
        self.model = model
        self._known_ways: Ways = {} if ways is None else ways
        self.mesh = Mesh.of(model)
        self._moves: dict[tuple[object, ...], GridCost] = {}
        self._supported: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._axes: dict[tuple[object, ...], tuple[Topology, ...]] = {}
        self._fleets: dict[tuple[str, bool], tuple[Fleet, ...]] = {}
        self._free = GridCost(np.zeros((FEATURES, 1, len(self.model.classes))))
        (nodes,) = self._of_kind("across")
        class_of_node = {d: c.index for c in nodes.classes for d in c.members}
        firsts = [self._node_of_kind(number) for number in range(len(self.mesh.kind_counts))]
        self._uplink_class = np.array([class_of_node[n] for n in firsts], dtype=np.int64)
        self._overlaps = _overlaps(self.mesh.nodes)

    # -- kernels -----------------------------------------------------------------------------------

    def kernels(
        self, equation: Equation, rule: Rule, found: Sequence[Signature], traffic: Traffic
    ) -> list[tuple[GridCost, GridCut]]:
        """Cost and cut of one equation under each of its signatures."""
        tensors = (*equation.input_types, *equation.output_types)
        flop = flop_count(rule, equation)
        launch, byte_per_s = self.model.overheads(equation, traffic)
        through = (*traffic.ins, *traffic.outs)
        free = equation.primitive in ALIASES
        product = _is_product(equation)
        # How a product is cut makes its parts faster or slower; of all else only there is less.
        every = None if product else self.model.arithmetic_s(equation, flop, ())
        known: dict[tuple[object, ...], GridCost] = {}
        result: list[tuple[GridCost, GridCut]] = []
        for signature, (cut, categories, ways) in zip(
            found, self._ways(tensors, found, product), strict=True
        ):
            if free:
                result.append((self._free, cut))
                continue
            nbytes = [0.0] * 4
            for tensor, category, counts in zip(tensors, categories, through, strict=True):
                nbytes[category] += tensor.nbytes if counts else 0
            key = (*nbytes, cut, ways)
            if key not in known:
                seconds = every
                if seconds is None:
                    seconds = self.model.arithmetic_s(equation, flop, self._cuts(signature, tensors))
                terms = np.zeros((FEATURES, 2, len(launch)))
                terms[ONE] = launch
                terms[(RQ if cut.within else R) if cut.across else (Q if cut.within else ONE), 0] += seconds
                for feature, count in zip((ONE, R, Q, RQ), nbytes, strict=True):
                    terms[feature, 1] += count / byte_per_s
                known[key] = GridCost(terms)
            result.append((known[key], cut))
        return result

    def _ways(
        self, tensors: tuple[TensorType, ...], found: Sequence[Signature], product: bool
    ) -> Sequence[_Way]:
        """How signatures cut, and which of its sizes, if that is a product, on each axis."""
        key = id(found), tensors, product
        if key not in self._known_ways:
            ways: list[_Way] = []
            for signature in found:
                cut, categories = _cut_of(tensors, (*signature.ins, *signature.outs))
                sizes = tuple([sharded_size(s) for s in on_axes(signature)]) if product else ()
                ways.append((cut, categories, sizes))
            if len(ways) == 1:  # of a program: what it asks for is made for it
                return ways
            # What is remembered by identity is kept, lest something else comes to have it.
            self._known_ways[key] = found, ways
        return self._known_ways[key][1]

    def _cuts(
        self, signature: Signature, tensors: Sequence[TensorType]
    ) -> tuple[tuple[Signature, float], ...]:
        """The signature on each axis, with the even share of its devices."""
        nodes = len(self.model.fleet.nodes)
        devices = (nodes, max(1, round(len(self.model.class_of) / nodes)))
        axes = on_axes(signature)
        if len(axes) == 1:  # R and Partial, on all devices alike
            return ((axes[0], 1.0),)
        shares = [
            even_share(tuple(tensors), (*one.ins, *one.outs), count)
            for one, count in zip(axes, devices, strict=True)
        ]
        return tuple(zip(axes, shares, strict=True))

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
                    strategies()[kind, name].supported(topology, (found.pre, found.post))
                    for topology in self._topologies(kind, name, 0, found.axis, by_leaders=_by_leaders(pre))
                    if topology.devices > 1
                )
            )
        return self._supported[key]

    def move(self, kind: str, strategy: str, tensor: TensorType, pre: Placement, post: Placement) -> GridCost:
        """Cost of one move of a tensor: on its axis, what the strategy costs on that axis' own fleet."""
        found = _step(pre, post)
        if collectives()[kind].local:
            return self._free
        across, within = components(pre)
        # On one of the axes it does not matter which dimensions are cut, but whether the other axis cuts any.
        what: object = found
        if found.axis != "all":
            what = found.axis, isinstance(across if found.axis == "within" else within, Shard)
        key = (kind, strategy, tensor.nbytes, what)
        if key not in self._moves:
            if found.axis == "all":
                self._moves[key] = self._of_all(kind, strategy, tensor, found)
            elif found.axis == "within":
                self._moves[key] = self._within(kind, strategy, tensor.nbytes, isinstance(across, Shard))
            else:
                self._moves[key] = self._across(kind, strategy, tensor.nbytes, not isinstance(within, Shard))
        return self._moves[key]

    def _of_all(self, kind: str, strategy: str, tensor: TensorType, found: Step) -> GridCost:
        classes = np.arange(len(self.model.classes))
        cost = self.model.move(kind, strategy, tensor, found.pre, found.post)
        return GridCost(_placed(np.zeros((FEATURES, 1, len(classes))), classes, cost, ONE, RQ, RQ2))

    def _within(self, kind: str, strategy: str, nbytes: int, of_share: bool) -> GridCost:
        """Of what a node has: all of the tensor, or its share; what grows with bytes then grows with r."""
        entry = strategies()[kind, strategy]
        terms = np.zeros((FEATURES, 1, len(self.model.classes)))
        mesh = self.mesh
        for number, topology in enumerate(
            self._topologies(kind, strategy, nbytes, "within", by_leaders=False)
        ):
            mine = np.flatnonzero(mesh.kind_of == number)
            if topology.devices == 1:
                continue
            whole = entry.price(topology, nbytes, topology.classes)
            if not of_share:
                terms = _placed(terms, mine, whole, ONE, Q, Q2)
                continue
            nothing = entry.price(topology, 0, topology.classes)
            terms = _placed(terms, mine, nothing, ONE, Q, Q2)
            grows = ShareCost(
                whole.constant - nothing.constant,
                whole.linear - nothing.linear,
                whole.product - nothing.product,
            )
            terms = _placed(terms, mine, grows, R, RQ, R_Q2)
        return GridCost(terms)

    def _across(self, kind: str, strategy: str, nbytes: int, by_leaders: bool) -> GridCost:
        """All devices of a node at once, each with its stretch; or a leader that hands on what it gets."""
        (topology,) = self._topologies(kind, strategy, nbytes, "across", by_leaders=by_leaders)
        entry, mesh = strategies()[kind, strategy], self.mesh
        links = entry.transfer(topology, nbytes)
        terms = np.zeros((FEATURES, 1, len(self.model.classes)))
        of_kind = self._uplink_class[mesh.kind_of]
        for k, kind_class in enumerate(of_kind):
            column = ShareCost(*(a[:, [kind_class]] for a in (links.constant, links.linear, links.product)))
            terms = _placed(terms, np.array([k]), column, ONE, R, R2)
        # Nodes of unequal size cut a tensor at different points: one exchange per stretch between them.
        if not by_leaders:
            latency = entry.transfer(topology, 0).constant.max(axis=0)[of_kind]
            terms[ONE] += (self._overlaps - 1) * latency
        # Staging: a device hands its own stretch to the host, a leader all.
        whole, part = STAGED.get(kind, (2, 0))
        flat = self.model.topology
        copy = nbytes * flat.host_s_per_byte
        terms[ONE] += (whole + part) * flat.host_latency_s
        terms[ONE if by_leaders else Q] += whole * copy
        terms[R if by_leaders else RQ] += part * copy
        if by_leaders:
            terms = self._handed_on(kind, nbytes, terms)
        return GridCost(terms)

    def _handed_on(self, kind: str, nbytes: int, terms: Floats) -> Floats:
        """With what it takes to broadcast the result in every node, by the strategy that suits it best."""
        mesh = self.mesh
        names = collectives()["broadcast"].strategies
        for number, topology in enumerate(self._insides):
            mine = np.flatnonzero(mesh.kind_of == number)
            if topology.devices == 1:
                continue
            prices = [
                strategies()["broadcast", name].price(topology, nbytes, topology.classes) for name in names
            ]
            cheapest = min(prices, key=lambda price: float(price.constant.max()))
            if kind in ("reduce_scatter", "all_to_all"):  # the result is the node's share of the tensor
                terms[R][:, mine] += cheapest.constant.max(axis=0)
            else:
                terms[ONE][:, mine] += cheapest.constant.max(axis=0)
        return terms

    # -- the fleets of the axes ----------------------------------------------------------------------

    def _topologies(
        self, kind: str, strategy: str, nbytes: int, axis: str, *, by_leaders: bool
    ) -> tuple[Topology, ...]:
        """Within: of each kind of node alone. Across: of the nodes, each as one device."""
        key: tuple[object, ...] = (axis, by_leaders)
        fleets = self._of_kind(axis, by_leaders=by_leaders)
        seen = [fleet.under(f"{kind}.{strategy}", nbytes) for fleet in fleets]
        if any(a is not b for a, b in zip(seen, fleets, strict=True)):
            return tuple(map(Topology.of, seen))
        if key not in self._axes:
            self._axes[key] = tuple(map(Topology.of, fleets))
        return self._axes[key]

    def _of_kind(self, axis: str, *, by_leaders: bool = False) -> tuple[Fleet, ...]:
        key = axis, by_leaders and axis == "across"
        if key not in self._fleets:
            fleet, members = self.model.fleet, node_members(self.mesh.nodes)
            if axis == "within":
                kinds = range(len(self.mesh.kind_counts))
                nodes = [members[self._node_of_kind(kind)] for kind in kinds]
                found = [subfleet(fleet, node, f"node of kind {kind}") for kind, node in enumerate(nodes)]
            else:
                found = [replace(fleet, nodes=tuple(_as_device(n, fleet, by_leaders) for n in fleet.nodes))]
            self._fleets[key] = tuple(found)
        return self._fleets[key]

    @cached_property
    def _insides(self) -> tuple[Topology, ...]:
        """Of each kind of node alone, whatever is exchanged there."""
        return tuple(map(Topology.of, self._of_kind("within")))

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
    terms: Floats, mine: NDArray[np.intp], cost: ShareCost, constant: int, linear: int, product: int
) -> Floats:
    """`terms` with those of a cost of some classes added."""
    rows = max(terms.shape[1], len(cost.constant))
    terms = padded_rows(terms, rows)
    for feature, array in ((constant, cost.constant), (linear, cost.linear), (product, cost.product)):
        full = np.concatenate([array, array[:1].repeat(rows - len(array), axis=0)])
        terms[feature][:, mine] += full
    return terms


def _is_product(equation: Equation) -> bool:
    op = registry().get(equation.primitive)
    return op is not None and op.kind == "contraction"


def _cut_of(
    tensors: Sequence[TensorType], placements: Sequence[Placement]
) -> tuple[GridCut, tuple[int, ...]]:
    """How an instruction cuts; and per tensor 0: not, 1: across the nodes, 2: within them, 3: both."""
    across = within = 0
    nested = False
    categories: list[int] = []
    for tensor, placement in zip(tensors, placements, strict=True):
        a, w = components(placement)
        categories.append(isinstance(a, Shard) + 2 * isinstance(w, Shard))
        if isinstance(a, Shard):
            across = across or tensor.shape[a.dim] // a.unit
        if isinstance(w, Shard):
            within = within or tensor.shape[w.dim] // w.unit
            nested = nested or (isinstance(a, Shard) and a.dim == w.dim)
    return GridCut(across, within, nested), tuple(categories)


def grid_cut(tensors: Sequence[TensorType], placements: Sequence[Placement]) -> GridCut:
    """How an instruction with these tensors so placed cuts them."""
    return _cut_of(tensors, placements)[0]


class Settled:
    """Prices at ratios that are settled, as a bill asks for them: seconds of every class.

    Args:
        grid: prices.
        ratios: share of every device.
    """

    def __init__(self, grid: GridModel, ratios: Sequence[float]) -> None:
        self._grid = grid
        self._shares = GridShares(ratios, grid.mesh)

    def kernel(self, equation: Equation, signature: Signature, traffic: Traffic) -> ShareCost:
        """Seconds of one equation on every class."""
        ((cost, cut),) = self._grid.kernels(equation, rule_of(equation), (signature,), traffic)
        return self._fixed(cost, cut)

    def move(
        self, kind: str, strategy: str, tensor: TensorType, pre: Placement, post: Placement
    ) -> ShareCost:
        """Seconds of one move on every class."""
        cost = self._grid.move(kind, strategy, tensor, pre, post)
        return self._fixed(cost, grid_cut((tensor, tensor), (pre, post)))

    def _fixed(self, cost: GridCost, cut: GridCut) -> ShareCost:
        slowest = np.zeros(cost.terms.shape[2])
        np.maximum.at(slowest, self._grid.mesh.class_of, self._shares.per_device(cost, cut))
        return ShareCost.fixed(slowest.tolist())


def pricing(program: Program, model: CostModel, ratios: Sequence[float]) -> Pricing:
    """What prices the instructions of a program at some ratios, on one mesh axis or on two."""
    return model if nodes_of(program) is None else Settled(GridModel(model), ratios)
