"""Prices of instructions on two mesh axes: nodes, and the devices of each.

With r the share of a device's node, and q its own share of what the node has, device class c takes

    t_c(r, q) = max over rows of  sum over f of terms[f, row, c] * f(r, q)                  seconds
    f: 1, r, q, rq, r (1 - r), q (1 - q), rq (1 - rq), r q (1 - q)                          see `FEATURES`

and the instruction takes the maximum over the devices. A kernel's work shrinks with r where it is cut across
the nodes, with q where it is cut within them, with rq where both; so do its bytes, operand by operand. What a
collective costs on an axis is what its strategies cost on the fleet of that axis:

    within    each node by itself, on what it has of the tensor (a share r where that is cut across)
    across    the nodes as the devices of a fleet, joined by their uplinks: either all devices of a node at
              once, each with its stretch, or a leader that hands on what it gets
    all       all devices at once, as on one axis, with the share rq

so that no strategy is priced twice. With one of r and q fixed, t is affine in the other (but for the
products, which are taken by their tangent): two linear programs in turns set both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.bill import Pricing
from shardwright.cost.contractions import even_share, sharded_size
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.model import ALIASES, CostModel, Traffic
from shardwright.cost.moves import STAGED, strategies
from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.cost.subfleet import subfleet
from shardwright.cost.topology import Topology
from shardwright.ir.collectives import Step, step
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import Placement, Shard, components, deal, node_members
from shardwright.ir.program import Program, nodes_of
from shardwright.ir.rules import Rule, Signature, flop_count, on_axes, registry, rule_of

#: How many functions of (r, q) a cost is a combination of.
FEATURES = 8
_ONE, _R, _Q, _RQ, _R2, _Q2, _RQ2, _R_Q2 = range(FEATURES)


def features(r: Floats, q: Floats) -> Floats:
    """(features, *shape of r): what terms are multiplied with."""
    rq = r * q
    return np.stack([np.ones_like(r), r, q, rq, r * (1 - r), q * (1 - q), rq * (1 - rq), rq * (1 - q)])


@dataclass(frozen=True, slots=True, eq=False)
class GridCost:
    """Seconds of one instruction as a function of the shares; `terms` is (features, rows, classes)."""

    terms: Floats

    @property
    def varies(self) -> bool:
        """Whether the shares matter."""
        return bool(self.terms[1:].any())


@dataclass(frozen=True, slots=True)
class GridCut:
    """How an instruction cuts its tensors, which is what its shares are rounded by.

    Attributes:
        across: units of the dimension that is cut over the nodes; 0 where none is.
        within: units of the dimension that is cut within them, as a whole; 0 where none is.
        nested: whether the two are one dimension: a node then cuts what it has of it.
    """

    across: int = 0
    within: int = 0
    nested: bool = False


WHOLE = GridCut()


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """A fleet by nodes; arrays have one entry per device class of the fleet, but for `kind_counts`.

    Attributes:
        nodes: devices of every node.
        kind_of: the kind of every class's nodes.
        kind_counts: nodes of every kind.
        inside: devices of every class in one of its nodes.
        node_of, class_of: of every device.
    """

    nodes: tuple[int, ...]
    kind_of: NDArray[np.int64]
    kind_counts: NDArray[np.int64]
    inside: NDArray[np.int64]
    node_of: NDArray[np.int64]
    class_of: NDArray[np.int64]

    @staticmethod
    def of(model: CostModel) -> Mesh:
        """The mesh of a model's fleet."""
        fleet = model.fleet
        kinds: dict[object, int] = {}
        kind_of_node = [kinds.setdefault(node.kind, len(kinds)) for node in fleet.nodes]
        home = [fleet.devices[c.members[0]].node for c in model.classes]
        counts = np.bincount(kind_of_node, minlength=len(kinds))
        kind_of = np.array([kind_of_node[n] for n in home], dtype=np.int64)
        return Mesh(
            nodes=tuple(len(node.devices) for node in fleet.nodes),
            kind_of=kind_of,
            kind_counts=counts,
            inside=model.counts // counts[kind_of],
            node_of=np.array([d.node for d in fleet.devices], dtype=np.int64),
            class_of=model.class_of,
        )

    def ratios(self, r: Floats, q: Floats) -> tuple[float, ...]:
        """Share of every device from those per class of its node, and of itself in the node."""
        return tuple((r[self.class_of] * q[self.class_of]).tolist())

    def even(self) -> tuple[Floats, Floats]:
        """Shares r and q per class where all nodes have equal shares, and all devices of a node."""
        devices = np.bincount(self.kind_of, self.inside, minlength=len(self.kind_counts))
        return np.full(len(self.kind_of), 1.0 / len(self.nodes)), 1.0 / devices[self.kind_of]


class GridShares:
    """Shares per device after rounding, for every way to cut, and what stacks of costs take at them."""

    def __init__(self, ratios: Sequence[float], mesh: Mesh) -> None:
        self.mesh = mesh
        devices = np.asarray(ratios, dtype=np.float64)
        node_share: Floats = np.bincount(mesh.node_of, devices, minlength=len(mesh.nodes)).astype(np.float64)
        size = np.asarray(mesh.nodes)[mesh.node_of]
        total = node_share[mesh.node_of]
        self.of_nodes = node_share
        self.inside = np.where(total > 0, devices / np.where(total > 0, total, 1.0), 1.0 / size)
        self._known: dict[GridCut, tuple[Floats, NDArray[np.int64], NDArray[np.intp]]] = {}

    def shares(self, cut: GridCut) -> tuple[Floats, Floats]:
        """Shares r and q of every device, rounded to whole units."""
        mesh = self.mesh
        units = deal(cut.across, self.of_nodes) if cut.across else None
        r: Floats = self.of_nodes if units is None else np.asarray(units / cut.across, dtype=np.float64)
        if not cut.within:
            return r[mesh.node_of], self.inside
        q: Floats = np.empty(len(self.inside))
        known: dict[tuple[int, bytes], Floats] = {}
        for node, devices in enumerate(node_members(mesh.nodes)):
            here = slice(devices.start, devices.stop)
            own = int(units[node]) if units is not None and cut.nested else cut.within
            key = own, self.inside[here].tobytes()
            if key not in known:
                # A node that has nothing of a dimension has no units to deal: its shares count as they are.
                known[key] = deal(own, self.inside[here]) / own if own else self.inside[here]
            q[here] = known[key]
        return r[mesh.node_of], q

    def _at(self, cut: GridCut) -> tuple[Floats, NDArray[np.int64], NDArray[np.intp]]:
        """Features (features, kinds of devices), class of each kind, and kind of every device."""
        found = self._known.get(cut)
        if found is None:
            r, q = self.shares(cut)
            columns = np.stack(
                [self.mesh.class_of.astype(np.float64), np.round(r, 12), np.round(q, 12)], axis=1
            )
            _, first, kind = np.unique(columns, axis=0, return_index=True, return_inverse=True)
            found = self._known[cut] = (
                features(r[first], q[first]),
                self.mesh.class_of[first],
                kind.reshape(-1),
            )
        return found

    def per_device(self, cost: GridCost, cut: GridCut) -> Floats:
        """Seconds of every device."""
        at, class_of, kind = self._at(cut)
        return np.einsum("frd,fd->rd", cost.terms[:, :, class_of], at).max(axis=0)[kind]

    def stack(self, stack: GridStack, cuts: Sequence[GridCut]) -> Floats:
        """Seconds of the slowest device for many instructions, each with its cut."""
        seconds = np.empty(len(cuts))
        by_cut: dict[GridCut, list[int]] = {}
        for k, cut in enumerate(cuts):
            by_cut.setdefault(cut, []).append(k)
        for cut, which in by_cut.items():
            at, class_of, _ = self._at(cut)
            seconds[which] = np.einsum("kfrd,fd->krd", stack.terms[which][:, :, :, class_of], at).max(
                axis=(1, 2)
            )
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class GridStack:
    """Costs of many instructions; `terms` is (instructions, features, rows, classes)."""

    terms: Floats

    @staticmethod
    def of(costs: Sequence[GridCost]) -> GridStack:
        """Stack costs of equal classes; those with fewer rows repeat their first."""
        rows = max((cost.terms.shape[1] for cost in costs), default=1)
        return GridStack(np.stack([_padded_rows(cost.terms, rows) for cost in costs]))

    def take(self, which: NDArray[np.intp]) -> GridStack:
        """The stack of some of the instructions."""
        return GridStack(self.terms[which])

    def floor(self, mesh: Mesh) -> Floats:
        """The least every instruction can cost, whatever the shares: see `docs/search.md`.

        The products are never negative. Of the three shares r, q and rq, whichever alone says most is kept,
        each at its own best: the nodes' shares sum to one over the nodes, the devices' in each node, and rq
        over all devices. What the other two would add at least (nothing, or all of it where it is negative)
        is added to the constant.
        """
        one, kinds = self.terms[:, _ONE], range(len(mesh.kind_counts))
        least = {f: np.minimum(self.terms[:, f], 0.0) for f in (_R, _Q, _RQ)}
        everything = one + least[_R] + least[_Q] + least[_RQ]
        level = everything.max(axis=(1, 2))
        if self.terms[:, _RQ].any():
            base = one + least[_R] + least[_Q]
            level = np.maximum(
                level, _level(base, self.terms[:, _RQ], mesh.inside * mesh.kind_counts[mesh.kind_of])
            )
        if self.terms[:, _Q].any():
            base = one + least[_R] + least[_RQ]
            for kind in kinds:
                mine = np.flatnonzero(mesh.kind_of == kind)
                level = np.maximum(
                    level, _level(base[..., mine], self.terms[:, _Q][..., mine], mesh.inside[mine])
                )
        if self.terms[:, _R].any():
            base = one + least[_Q] + least[_RQ]
            columns = [_as_rows(base, np.flatnonzero(mesh.kind_of == kind)) for kind in kinds]
            slopes = [_as_rows(self.terms[:, _R], np.flatnonzero(mesh.kind_of == kind)) for kind in kinds]
            rows = max(column.shape[1] for column in columns)
            level = np.maximum(
                level, _level(_side_by_side(columns, rows), _side_by_side(slopes, rows), mesh.kind_counts)
            )
        return level


def _as_rows(array: Floats, mine: NDArray[np.intp]) -> Floats:
    """(instructions, rows x classes): the classes of one kind of nodes as rows of one column."""
    return array[..., mine].reshape(len(array), -1)


def _side_by_side(columns: Sequence[Floats], rows: int) -> Floats:
    full = [np.concatenate([c, c[:, :1].repeat(rows - c.shape[1], axis=1)], axis=1) for c in columns]
    return np.stack(full, axis=2)


def _level(constant: Floats, linear: Floats, counts: NDArray[np.int64]) -> Floats:
    return CostStack(constant, linear, np.zeros_like(linear)).floor(counts)


def _padded_rows(terms: Floats, rows: int) -> Floats:
    missing = rows - terms.shape[1]
    return terms if not missing else np.concatenate([terms, terms[:, :1].repeat(missing, axis=1)], axis=1)


class GridModel:
    """Prices every instruction for one fleet of several nodes, in the fleet's device classes.

    Attributes:
        model: prices of the same fleet on one axis.
        mesh: the fleet by nodes.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.mesh = Mesh.of(model)
        self._moves: dict[tuple[object, ...], GridCost] = {}
        self._supported: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._axes: dict[tuple[object, ...], tuple[Topology, ...]] = {}
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
        known: dict[tuple[object, ...], GridCost] = {}
        result: list[tuple[GridCost, GridCut]] = []
        for signature in found:
            cut, categories = _cut_of(tensors, (*signature.ins, *signature.outs))
            if free:
                result.append((self._free, cut))
                continue
            nbytes = [0.0] * 4
            for tensor, category, counts in zip(tensors, categories, through, strict=True):
                nbytes[category] += tensor.nbytes if counts else 0
            ways = tuple(sharded_size(s) for s in on_axes(signature)) if _is_product(equation) else ()
            key = (*nbytes, cut, ways)
            if key not in known:
                seconds = self.model.arithmetic_s(equation, flop, self._cuts(signature, tensors))
                terms = np.zeros((FEATURES, 2, len(launch)))
                terms[_ONE] = launch
                terms[(_RQ if cut.within else _R) if cut.across else (_Q if cut.within else _ONE), 0] += (
                    seconds
                )
                for feature, count in zip((_ONE, _R, _Q, _RQ), nbytes, strict=True):
                    terms[feature, 1] += count / byte_per_s
                known[key] = GridCost(terms)
            result.append((known[key], cut))
        return result

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
        key = (kind, strategy, tensor.nbytes, found, isinstance(across, Shard), isinstance(within, Shard))
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
        return GridCost(_placed(np.zeros((FEATURES, 1, len(classes))), classes, cost, _ONE, _RQ, _RQ2))

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
                terms = _placed(terms, mine, whole, _ONE, _Q, _Q2)
                continue
            nothing = entry.price(topology, 0, topology.classes)
            terms = _placed(terms, mine, nothing, _ONE, _Q, _Q2)
            grows = ShareCost(
                whole.constant - nothing.constant,
                whole.linear - nothing.linear,
                whole.product - nothing.product,
            )
            terms = _placed(terms, mine, grows, _R, _RQ, _R_Q2)
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
            terms = _placed(terms, np.array([k]), column, _ONE, _R, _R2)
        # Nodes of unequal size cut a tensor at different points: one exchange per stretch between them.
        if not by_leaders:
            latency = entry.transfer(topology, 0).constant.max(axis=0)[of_kind]
            terms[_ONE] += (self._overlaps - 1) * latency
        # Staging: a device hands its own stretch to the host, a leader all.
        whole, part = STAGED.get(kind, (2, 0))
        flat = self.model.topology
        copy = nbytes * flat.host_s_per_byte
        terms[_ONE] += (whole + part) * flat.host_latency_s
        terms[_ONE if by_leaders else _Q] += whole * copy
        terms[_R if by_leaders else _RQ] += part * copy
        if by_leaders:
            terms = self._handed_on(kind, nbytes, terms)
        return GridCost(terms)

    def _handed_on(self, kind: str, nbytes: int, terms: Floats) -> Floats:
        """With what it takes to broadcast the result in every node, by the strategy that suits it best."""
        mesh = self.mesh
        names = collectives()["broadcast"].strategies
        for number, members in enumerate(self._of_kind("within")):
            mine = np.flatnonzero(mesh.kind_of == number)
            if len(members.devices) == 1:
                continue
            topology = Topology.of(members)
            prices = [
                strategies()["broadcast", name].price(topology, nbytes, topology.classes) for name in names
            ]
            cheapest = min(prices, key=lambda price: float(price.constant.max()))
            if kind in ("reduce_scatter", "all_to_all"):  # the result is the node's share of the tensor
                terms[_R][:, mine] += cheapest.constant.max(axis=0)
            else:
                terms[_ONE][:, mine] += cheapest.constant.max(axis=0)
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
        fleet, members = self.model.fleet, node_members(self.mesh.nodes)
        if axis == "within":
            kinds = range(len(self.mesh.kind_counts))
            return tuple(subfleet(fleet, members[self._node_of_kind(k)], f"node of kind {k}") for k in kinds)
        return (replace(fleet, nodes=tuple(_as_device(n, fleet, by_leaders) for n in fleet.nodes)),)

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
    terms = _padded_rows(terms, rows)
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


def tangent_in_nodes(stack: GridStack, r: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Constant and slope, (instructions, rows, classes), of rows that touch the cost at r; q is fixed."""
    t = stack.terms
    slope = t[:, _R] + t[:, _RQ] * q + t[:, _R2] * (1 - 2 * r) + t[:, _RQ2] * q * (1 - 2 * r * q)
    slope = slope + t[:, _R_Q2] * q * (1 - q)
    constant = (
        t[:, _ONE] + t[:, _Q] * q + t[:, _Q2] * q * (1 - q) + t[:, _R2] * r * r + t[:, _RQ2] * (r * q) ** 2
    )
    return constant, slope


def tangent_in_devices(stack: GridStack, r: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Constant and slope, (instructions, rows, classes), of rows that touch the cost at q; r is fixed."""
    t = stack.terms
    slope = t[:, _Q] + t[:, _RQ] * r + t[:, _Q2] * (1 - 2 * q) + t[:, _RQ2] * r * (1 - 2 * r * q)
    slope = slope + t[:, _R_Q2] * r * (1 - 2 * q)
    constant = t[:, _ONE] + t[:, _R] * r + t[:, _R2] * r * (1 - r) + t[:, _Q2] * q * q
    return constant + t[:, _RQ2] * (r * q) ** 2 + t[:, _R_Q2] * r * q * q, slope
