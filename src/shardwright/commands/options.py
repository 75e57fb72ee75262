"""Options that commands share, and the values of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from re import fullmatch
from typing import Literal

import click

from shardwright.cost.quantity import DURATION, parse_quantity
from shardwright.ir.errors import InputError

factory_argument = click.argument("target", metavar="FILE_OR_MODULE:FACTORY")
fleet_option = click.option(
    "--fleet", "fleet_path", required=True, metavar="FLEET.yaml", help="The fleet file."
)
all_devices_option = click.option(
    "--all-devices", is_flag=True, help="Use every device, even where fewer are faster."
)
axes_option = click.option(
    "--axes",
    type=click.Choice(["1", "2", "auto"]),
    default="auto",
    help="Mesh axes: all devices alike, or nodes and the devices in each.",
)
recompute_option = click.option(
    "--recompute",
    type=click.Choice(["auto", "off", "all"]),
    default="auto",
    help="Compute parts of the forward pass again in the backward pass: where memory is short, never, all.",
)
offload_option = click.option(
    "--offload",
    type=click.Choice(["auto", "off", "all"]),
    default="auto",
    help="Let what the backward pass needs wait in host memory: where memory is short, never, all of it.",
)
microbatches_option = click.option(
    "--microbatches",
    default="auto",
    metavar="auto|NUMBER",
    help="Run forward and backward pass on so many equal pieces of the batch, one after another.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def parse_axes(given: str) -> Literal[1, 2, "auto"]:
    """The value of `--axes` as `shardwright.synthesize` takes it."""
    return 1 if given == "1" else 2 if given == "2" else "auto"


def parse_pins(given: Sequence[str]) -> Mapping[str, str] | None:
    """`PATTERN=PLACEMENT` options as constraints; None without any.

    Raises:
        InputError: an option has no `=`, or two fix the same pattern.
    """
    found: dict[str, str] = {}
    for text in given:
        pattern, equals, placement = text.rpartition("=")
        if not equals or not pattern:
            raise InputError(
                place=f"--pin {text}",
                reason="has no pattern and placement",
                remedy="Write --pin 'params/*/kernel=S(0)'",
            )
        if found.setdefault(pattern, placement) != placement:
            raise InputError(
                place=f"--pin {text}",
                reason=f"{pattern} is pinned to {found[pattern]} already",
                remedy="Leave one of them out",
            )
    return found or None


def parse_microbatches(given: str) -> Literal["auto"] | int:
    """The value of `--microbatches` as `shardwright.synthesize` takes it.

    Raises:
        InputError: it is neither `auto` nor a number.
    """
    if given == "auto":
        return "auto"
    if not given.isdecimal() or int(given) < 1:
        raise InputError(
            place="--microbatches", reason=f"is {given!r}", remedy="Write auto, or a number from 1 on"
        )
    return int(given)


def parse_time_limit(given: str | None) -> float | None:
    """Seconds of a duration such as `10s`; a plain 0 is allowed.

    Raises:
        InputError: `given` is no duration.
    """
    if given is None:
        return None
    if fullmatch(r"0+(\.0*)?\s*(s|ms|us|µs|ns)?", given.strip()):
        return 0.0
    return parse_quantity(given, DURATION, place="--time-limit")
