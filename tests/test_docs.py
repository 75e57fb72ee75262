"""The code of the documentation runs: every page of `docs/` and the README, one test each.

Python blocks of a page share a namespace and run in order; bash blocks run the lines that start with
`shardwright `. Both run in a temporary folder in which `examples/` and `tests/` are those of the
repository. A comment above a block says what is special about it:

    <!-- file: NAME -->         it is written to NAME instead of being run
    <!-- printed -->            it is what the block before printed (`pytest --update-golden` rewrites it)
    <!-- exit 2 -->             its commands end with this exit code instead of 0
    <!-- not run: REASON -->    it is left alone
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from click.testing import CliRunner

from shardwright.backends.mpi import moves as mpi_moves
from shardwright.backends.spmd import moves as spmd_moves
from shardwright.cli import main
from shardwright.cost import moves
from shardwright.ir import collectives, registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINKED = (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")
NAMES = [str(page.relative_to(ROOT)) for page in LINKED]

#: With this version of JAX pages were printed. With others steps are traced a little differently.
PRINTED_WITH = (0, 10, 2)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its lines from `line` (counted from one) on, and the comment above it."""

    language: str
    line: int
    text: str
    note: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.splitlines()
    note, fence, first, language = "", "", 0, ""
    for number, line in enumerate(lines, 1):
        if not fence and (opening := re.fullmatch(r"(```+)(\w*)", line)):
            fence, language, first = opening[1], opening[2], number + 1
        elif fence and line == fence:
            yield Block(language, first, "".join(f"{text}\n" for text in lines[first - 1 : number - 1]), note)
            note, fence = "", ""
        elif not fence and line.strip():
            comment = re.fullmatch(r"<!-- (.*) -->", line.strip())
            note = comment[1] if comment else ""
    assert not fence, f"the block at line {first} is not closed"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder beside which the repository's seems to be; what a page registers goes afterwards."""
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT), *sys.path])
    loaded = set(sys.modules)
    tables: list[Any] = [
        registry.registry(),
        moves.strategies(),
        mpi_moves.lowerings(),
        spmd_moves.lowerings(),
    ]
    before = [dict(table) for table in tables]
    strategies = {type(c): type(c).strategies for c in collectives.registry().values()}
    yield tmp_path
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    for kind, names in strategies.items():
        kind.strategies = names
    for name in [name for name in sys.modules if name not in loaded]:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if origin.startswith((str(tmp_path), str(ROOT / "examples"))):
            del sys.modules[name]


def run_python(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """What a block prints; tracebacks show the line of the page."""
    source = "\n" * (block.line - 1) + block.text
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(page), "exec"), namespace)
    return printed.getvalue()


def run_bash(block: Block, expected: int) -> str:
    """What the block's `shardwright` commands print, on either stream."""
    commands = block.text.replace("\\\n", " ").splitlines()
    printed = ""
    for command in commands:
        arguments = shlex.split(command, comments=True)
        if arguments[:1] != ["shardwright"]:
            continue
        result = CliRunner().invoke(main, arguments[1:])
        printed += result.output
        assert result.exit_code == expected, f"{command}\n{result.output}\n{result.exception!r}"
    return printed


def is_printed(text: str, printed: str) -> bool:
    """Whether a page says what was printed; but for the numbers, if another version of JAX printed them."""
    if jax.__version_info__ == PRINTED_WITH:
        return text == printed
    words, others = (re.split(r"[\d.,]*\d|[\s|:-]+", each) for each in (text, printed))
    return words == others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page: Path, folder: Path, request: pytest.FixtureRequest) -> None:
    text = page.read_text()
    rewritten: list[tuple[Block, str]] = []
    update = request.config.getoption("--update-golden", default=False)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    printed = ""
    for block in blocks(text):
        kind, _, rest = block.note.partition(" ")
        if kind == "file:":
            (folder / rest).write_text(block.text)
        elif kind == "printed":
            if update:
                rewritten.append((block, printed))
            else:
                assert is_printed(block.text, printed), (
                    f"line {block.line}: pytest --update-golden shows what changed"
                )
        elif block.language == "python" and kind != "not":
            printed = run_python(block, page, namespace)
        elif block.language == "bash" and kind != "not":
            printed = run_bash(block, int(rest) if kind == "exit" else 0)
    if rewritten:
        lines = text.splitlines(keepends=True)
        for block, output in reversed(rewritten):
            lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [output]
        page.write_text("".join(lines))


def anchors(page: Path) -> set[str]:
    """What `#…` may name on a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    outside_code = re.sub(r"^(```+).*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_code):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} does not exist"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{target} names no heading"


def test_every_named_file_exists() -> None:
    """Paths of our own in backticks, such as `synth/space/space.py`."""
    folders = "ir|synth|cost|backends|examples|tests|docs|bench"
    for page in LINKED:
        for path in re.findall(rf"`((?:{folders}|src/shardwright)/[\w/.-]*\w)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
