"""Reads the pages of the documentation for tests: README, CONTRIBUTING, CHANGELOG and docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Number of the block's first line of text in the page, counted from 1."""
    not_run: str
    """The reason why the tests do not run the block, from a comment in the line above; empty if they run it."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks in a page's text."""
    found: list[Block] = []
    lines = text.splitlines()
    fence, language, begin, why = "", "", 0, ""
    for number, line in enumerate(lines, start=1):
        if not fence and (opening := re.match(r"(`{3,}|:{3,})(.*)$", line)):
            fence, language, begin = opening[1], opening[2].strip(), number + 1
            above = NOT_RUN.match(next((one for one in reversed(lines[: number - 1]) if one), ""))
            why = above[1] if above else ""
        elif fence and line.strip() == fence:
            found.append(Block(language, "\n".join(lines[begin - 1 : number - 1]) + "\n", begin, why))
            fence = ""
    assert not fence, f"the block that begins in line {begin} does not end"
    return found


def printed_outputs(text: str) -> list[tuple[Block, Block]]:
    """Return every Python block that a block of the language ``output`` follows, with that block."""
    found = blocks(text)
    return [
        (block, after) for block, after in pairwise(found) if block.language == "python" and after.language == "output"
    ]


def agrees(expected: str, printed: str) -> bool:
    """Return whether a program printed the ``expected`` output, in which ``...`` stands for any text."""
    pattern = ".*".join(re.escape(part) for part in expected.split("..."))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def prose(text: str) -> str:
    """Return the page's text without its fenced blocks."""
    lines = text.splitlines()
    for block in blocks(text):
        length = block.text.count("\n")
        lines[block.line - 2 : block.line + length] = [""] * (length + 2)
    return "\n".join(lines)
