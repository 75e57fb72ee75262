"""Documents that people write: strict YAML, and values that know where they stand.

`load_yaml` accepts the plain part of YAML only: mappings, lists and scalars. Tags, anchors, aliases,
several documents, repeated keys, deep nesting and large files are errors. An `Entry` is a value with its
place; its methods either return what the grammar asks for or raise one `InputError` that says where, why
and what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike, fspath
from typing import cast

import yaml
from yaml.constructor import SafeConstructor

from shardwright.cost.quantity import Kind, parse_quantity
from shardwright.ir.errors import InputError

LARGEST_FILE_BYTES = 64 * 1024
DEEPEST_NESTING = 16
LONGEST_TEXT = 200

#: What YAML 1.1 takes for numbers, of base 8 and 60, and people for decimal ones, times or names.
_OTHER_BASE = re.compile(r"[-+]?0[0-7_]+|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")

#: Quantities beyond this, or its inverse, are of no machine.
_MOST = 1e30


@dataclass(frozen=True, slots=True)
class Entry:
    """A value within a document.

    Attributes:
        value: plain data: a mapping, a list, text, a number, true or false, or None.
        source: the document, such as "lab.yaml".
        path: the way from the top to the value, such as "nodes[1].devices.count"; empty at the top.
    """

    value: object
    source: str
    path: str = ""

    @property
    def place(self) -> str:
        """Where the value stands: `lab.yaml: nodes[1].devices.count`."""
        return f"{self.source}: {self.path}" if self.path else self.source

    def error(self, reason: str, remedy: str) -> InputError:
        """The error to raise about this value."""
        return InputError(place=self.place, reason=reason, remedy=remedy)

    def child(self, key: str, value: object) -> Entry:
        """The entry of `value` under `key` of this mapping."""
        return Entry(value, self.source, f"{self.path}.{key}" if self.path else key)

    def mapping(
        self,
        *,
        required: Sequence[str],
        optional: Sequence[str] = (),
        elsewhere: Mapping[str, str] | None = None,
    ) -> dict[str, Entry]:
        """The entries of a mapping that has every required key and no unknown one, in document order.

        Args:
            required: keys.
            optional: more keys.
            elsewhere: keys that have their place somewhere else, and where.
        """
        if not isinstance(self.value, Mapping):
            raise self.error(
                f"is {_described(self.value)}, not a mapping",
                f"Write a mapping with the keys {_listed(required or optional)}",
            )
        known = (*required, *optional)
        entries: dict[str, Entry] = {}
        for key, value in cast("Mapping[object, object]", self.value).items():
            if key not in known:
                key_text = key if isinstance(key, str) and key.isprintable() else repr(key)
                near = get_close_matches(key_text[:LONGEST_TEXT], known, n=1)
                hint = f"Did you mean '{near[0]}'? " if near else ""
                if elsewhere and key_text in elsewhere:
                    hint = f"It goes {elsewhere[key_text]}. "
                raise self.child(_shortened(key_text), value).error(
                    "is an unknown key", f"{hint}The known keys here are {_listed(known)}"
                )
            entries[str(key)] = self.child(str(key), value)
        missing = [key for key in required if key not in entries]
        if missing:
            plural = "s" if len(missing) > 1 else ""
            raise self.error(
                f"lacks the key{plural} {_listed(missing)}",
                f"Add {_listed(missing)}; required are {_listed(required)}",
            )
        return entries

    def sequence(self) -> tuple[Entry, ...]:
        """The entries of a list that is not empty."""
        if not isinstance(self.value, list | tuple):
            raise self.error(
                f"is {_described(self.value)}, not a list", "Write a list with at least one entry"
            )
        if not self.value:
            raise self.error("is empty", "Give at least one entry")
        items = cast("Sequence[object]", self.value)
        return tuple(Entry(item, self.source, f"{self.path}[{i}]") for i, item in enumerate(items))

    def text(self) -> str:
        """Printable text that is not blank."""
        if not isinstance(self.value, str):
            raise self.error(
                f"is {_described(self.value)}, not text",
                "Write text; put it in quotes if YAML reads more into it",
            )
        if not self.value.strip() or not self.value.isprintable() or len(self.value) > LONGEST_TEXT:
            raise self.error(
                f"is {_described(self.value)}",
                f"Write 1 to {LONGEST_TEXT} printable characters that are not all blank",
            )
        return self.value

    def count(self, *, most: int) -> int:
        """A whole number from 1 to `most`."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self.error(
                f"is {_described(self.value)}, not a whole number", f"Write a whole number from 1 to {most}"
            )
        if not 1 <= self.value <= most:
            wrong = "negative" if self.value < 0 else "zero" if self.value == 0 else "too large"
            raise self.error(f"is {wrong}", f"Write a whole number from 1 to {most}")
        return self.value

    def fraction(self) -> float:
        """A number above 0 and at most 1."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not is_number or not 0 < cast("float", self.value) <= 1:
            raise self.error(f"is {_described(self.value)}", "Write a number above 0 and at most 1")
        return float(cast("float", self.value))

    def price(self) -> float:
        """A finite number above 0."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not is_number or not 0 < cast("float", self.value) < math.inf:
            raise self.error(f"is {_described(self.value)}", "Write what an hour costs as a number above 0")
        return float(cast("float", self.value))

    def factor(self) -> float:
        """A number from 1 to a million."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not is_number or not 1 <= cast("float", self.value) <= 1e6:
            raise self.error(f"is {_described(self.value)}", "Write a number from 1 to 1e6, such as 1.5")
        return float(cast("float", self.value))

    def one_of(self, known: Sequence[str]) -> str:
        """One of several words."""
        word = self.text()
        if word not in known:
            near = get_close_matches(word, known, n=1)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            raise self.error(f"{word!r} is not known here", f"{hint}The known ones are {_listed(known)}")
        return word

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.error(f"is {_described(self.value)}", "Write true or false")
        return self.value

    def quantity(self, kind: Kind) -> float:
        """A quantity in the base unit of its kind, neither huge nor next to nothing."""
        amount = parse_quantity(self.value, kind, place=self.place)
        if not 1 / _MOST <= amount <= _MOST:
            wrong = "large" if amount > 1 else "small"
            remedy = f"Give a {kind.name} from {1 / _MOST:g} to {_MOST:g} {kind.base}"
            raise self.error(f"{self.value!r} is too {wrong}", remedy)
        return amount


def load_yaml(path: str | PathLike[str]) -> Entry:
    """The document in a YAML file.

    Raises:
        InputError: the file cannot be read, is too large, is no UTF-8 or no YAML, holds no document or
            several, or uses tags, anchors, aliases, repeated keys or nesting beyond `DEEPEST_NESTING`.
    """
    source = fspath(path)
    try:
        with open(source, "rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
        raise InputError(
            place=source,
            reason=f"cannot be read ({reason})",
            remedy="Name a file that exists and is readable",
        ) from None
    if len(data) > LARGEST_FILE_BYTES:
        raise InputError(
            place=source,
            reason=f"is larger than {LARGEST_FILE_BYTES} bytes",
            remedy="Group equal nodes with `count`",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise InputError(
            place=source, reason=f"is not UTF-8 text (byte {problem.start})", remedy="Save the file as UTF-8"
        ) from None
    return Entry(_parse(text, source), source)


def _parse(text: str, source: str) -> object:
    """The plain data of a YAML text."""
    try:
        _refuse_fancy_yaml(text, source)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as problem:
        mark = problem.problem_mark if isinstance(problem, yaml.MarkedYAMLError) else None
        what = problem.problem if isinstance(problem, yaml.MarkedYAMLError) else "unprintable characters"
        raise InputError(
            place=_line(source, mark), reason=f"is not valid YAML ({what})", remedy="Correct the syntax there"
        ) from None
    if node is None:
        raise InputError(place=source, reason="is empty", remedy="Write a document into it")
    return _plain(node, source)


def _refuse_fancy_yaml(text: str, source: str) -> None:
    """Reject, before anything is built, what a plain document does not need and an attacker does."""
    depth = documents = 0
    for event in cast("Iterator[yaml.Event]", yaml.parse(text, Loader=yaml.SafeLoader)):
        place = _line(source, event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise InputError(
                    place=place, reason="starts a second document", remedy="Keep one document per file"
                )
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            name = "alias *" if isinstance(event, yaml.AliasEvent) else "anchor &"
            raise InputError(
                place=place,
                reason=f"uses the {name}{event.anchor}",
                remedy="Write the values out; `count` repeats equal ones",
            )
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise InputError(
                place=place, reason=f"uses the tag {event.tag}", remedy="Write plain values without tags"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_NESTING:
            raise InputError(
                place=place,
                reason=f"is nested more than {DEEPEST_NESTING} deep",
                remedy="Flatten the document",
            )


def _plain(node: yaml.Node, source: str) -> object:
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, source)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, source) for item in node.value]
    return _plain_scalar(cast("yaml.ScalarNode", node), source)


def _plain_mapping(node: yaml.MappingNode, source: str) -> dict[str, object]:
    data: dict[str, object] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(
                place=_line(source, key.start_mark),
                reason="has a key that is no text",
                remedy="Use a word as the key",
            )
        if key.value in data:
            raise InputError(
                place=_line(source, key.start_mark),
                reason=f"repeats the key '{_shortened(key.value)}'",
                remedy="Keep one of the two",
            )
        data[key.value] = _plain(value, source)
    return data


def _plain_scalar(node: yaml.ScalarNode, source: str) -> object:
    """A number, true, false or None where YAML reads one; the text itself for all else, dates included."""
    read = SafeConstructor()
    try:
        if node.tag.endswith((":int", ":float")) and _OTHER_BASE.fullmatch(node.value):
            raise InputError(
                place=_line(source, node.start_mark),
                reason=f"{_shortened(node.value)!r} is no decimal number: YAML reads base 8 or 60",
                remedy="Leave out zeros in front and colons, or write quotes around a text",
            )
        match node.tag.rpartition(":")[2]:
            case "int":
                return read.construct_yaml_int(node)
            case "float":
                return read.construct_yaml_float(node)
            case "bool":
                return read.construct_yaml_bool(node)
            case "null":
                return None
            case _:
                return node.value
    except (
        ValueError
    ):  # `0x_` looks like a number to YAML and is none; 5,000 digits are more than int() takes
        return node.value


def _line(source: str, mark: yaml.Mark | None) -> str:
    return source if mark is None else f"{source}: line {mark.line + 1}"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


def _described(value: object) -> str:
    """What a value is, in words and on one line."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case int():
            return f"the number {value}" if abs(value) < 10**18 else "a huge number"
        case float():
            return f"the number {value}" if math.isfinite(value) else f"not a finite number ({value})"
        case str():
            return f"the text {_shortened(value)!r}"
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case _:
            return f"a value of type {type(value).__name__}"
