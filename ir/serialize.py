"""A program as plain dicts, lists, strings and integers, and back; placements as their text.

    program ::= {"inputs": [placement], "instructions": [instruction], "outputs": [placement],
                 "nodes": [devices]?,                              where placements are on two mesh axes
                 "own_ratios": {number: [share]}?}                 where they are not cut by the plan's ratios
    compute ::= {"compute": equation, "ins": [placement], "outs": [placement]}
    loop    ::= {"loop": equation, "ins": [placement], "outs": [placement], "bodies": [program]}
    move    ::= {"move": kind, "value": n, "pre": placement, "post": placement,
                 "strategy": name?, "group": [device]?, "root": device?}

`program_from_json(program_to_json(p)) == p`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from shardwright.ir.errors import ProgramError
from shardwright.ir.placement import OwnRatios, Placement, own_from_json, own_to_json, parse_placement
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program, nodes_of, own_ratios
from shardwright.ir.rules import Signature

T = TypeVar("T")


class Lies(NamedTuple):
    """What the texts of placements leave out.

    Attributes:
        nodes: devices of every node; None where programs are on one mesh axis.
        own: ratios that are not the plan's.
    """

    nodes: tuple[int, ...] | None
    own: Mapping[int, OwnRatios]


def program_to_json(program: Program) -> dict[str, Any]:
    """A program as plain data."""
    nodes, own = nodes_of(program), own_ratios(program)
    return {
        **({} if nodes is None else {"nodes": list(nodes)}),
        **({"own_ratios": own_to_json(own)} if own else {}),
        "inputs": [str(p) for p in program.inputs],
        "instructions": [_instruction(i) for i in program.instructions],
        "outputs": [str(p) for p in program.outputs],
    }


def _instruction(instruction: Instruction) -> dict[str, Any]:
    if isinstance(instruction, Move):
        move: dict[str, Any] = {
            "move": instruction.kind,
            "value": instruction.value,
            "pre": str(instruction.pre),
            "post": str(instruction.post),
        }
        if instruction.strategy:
            move["strategy"] = instruction.strategy
        if instruction.group is not None:
            move["group"] = list(instruction.group)
        if instruction.root is not None:
            move["root"] = instruction.root
        return move
    signature = instruction.signature
    sides = {"ins": [str(p) for p in signature.ins], "outs": [str(p) for p in signature.outs]}
    if isinstance(instruction, Compute):
        return {"compute": instruction.equation, **sides}
    return {
        "loop": instruction.equation,
        **sides,
        "bodies": [program_to_json(body) for body in instruction.bodies],
    }


def program_from_json(data: Any, place: str = "program") -> Program:
    """Inverse of `program_to_json`.

    Raises:
        ProgramError: naming the entry that is missing, unknown or of the wrong kind.
    """
    keys = _keys(data, place, {"inputs", "instructions", "outputs"}, {"nodes", "own_ratios"})
    entries = _list(keys["instructions"], f"{place}.instructions")
    nodes = None
    if "nodes" in keys:
        nodes = tuple(_number(n, f"{place}.nodes") for n in _list(keys["nodes"], f"{place}.nodes"))
    lies = Lies(nodes, own_from_json(keys.get("own_ratios", {})))
    return Program(
        _placements(keys["inputs"], f"{place}.inputs", lies),
        tuple(_read(entry, f"{place}.instructions[{i}]", lies) for i, entry in enumerate(entries)),
        _placements(keys["outputs"], f"{place}.outputs", lies),
    )


def _read(data: Any, place: str, lies: Lies) -> Instruction:
    if isinstance(data, Mapping) and "move" in data:
        keys = _keys(data, place, {"move", "value", "pre", "post"}, {"strategy", "group", "root"})
        group, root = keys.get("group"), keys.get("root")
        return Move(
            _text(keys["move"], f"{place}.move"),
            _number(keys["value"], f"{place}.value"),
            parse_placement(_text(keys["pre"], f"{place}.pre"), *lies),
            parse_placement(_text(keys["post"], f"{place}.post"), *lies),
            _text(keys.get("strategy", ""), f"{place}.strategy"),
            None
            if group is None
            else tuple(_number(i, f"{place}.group") for i in _list(group, f"{place}.group")),
            None if root is None else _number(root, f"{place}.root"),
        )
    kind = "loop" if isinstance(data, Mapping) and "loop" in data else "compute"
    keys = _keys(data, place, {kind, "ins", "outs"} | ({"bodies"} if kind == "loop" else set()))
    equation = _number(keys[kind], f"{place}.{kind}")
    signature = Signature(
        _placements(keys["ins"], f"{place}.ins", lies), _placements(keys["outs"], f"{place}.outs", lies)
    )
    if kind == "compute":
        return Compute(equation, signature)
    bodies = enumerate(_list(keys["bodies"], f"{place}.bodies"))
    return Loop(
        equation, signature, tuple(program_from_json(body, f"{place}.bodies[{i}]") for i, body in bodies)
    )


def _keys(data: Any, place: str, required: set[str], optional: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        _fail(place, f"is a {type(data).__name__}, not an object")
    keys = cast(Mapping[str, Any], data)
    missing, unknown = required - set(keys), set(keys) - required - (optional or set())
    if missing or unknown:
        what = (
            f"lacks {', '.join(sorted(missing))}"
            if missing
            else f"has unknown {', '.join(sorted(map(str, unknown)))}"
        )
        _fail(place, what)
    return dict(keys)


def _typed(kind: type[T], name: str) -> Callable[[Any, str], T]:
    def check(data: Any, place: str) -> T:
        if not isinstance(data, kind) or isinstance(data, bool):
            _fail(place, f"is {data!r}, not {name}")
        return cast(T, data)

    return check


_text = _typed(str, "a text")
_number = _typed(int, "a whole number")
_list: Callable[[Any, str], Sequence[Any]] = _typed(list, "a list")


def _placements(data: Any, place: str, lies: Lies) -> tuple[Placement, ...]:
    return tuple(parse_placement(_text(p, f"{place}[{i}]"), *lies) for i, p in enumerate(_list(data, place)))


def _fail(place: str, reason: str) -> None:
    raise ProgramError(place=place, reason=reason, remedy="Write the file again with `shardwright plan`")
