"""What tests of the page about a plan share: a reader of HTML, and shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

import jax

VOID = {"meta", "link", "br", "hr", "img", "path", "input"}


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


@dataclass
class Reader(HTMLParser):
    """Text by section, attributes by name, ids; complains about elements that are not closed."""

    text: dict[str, str] = field(default_factory=dict[str, str])
    attributes: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    open: list[str] = field(default_factory=list[str])
    inside: list[str] = field(default_factory=lambda: ["head"])

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "section" or tag == "header":
            self.inside.append(dict(attrs).get("id") or tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"{tag} closes another element at {self.getpos()}"
        if tag in ("section", "header"):
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        where = self.inside[-1]
        self.text[where] = f"{self.text.get(where, '')} {data}"

    def said(self, section: str) -> str:
        return " ".join(self.text[section].split())
