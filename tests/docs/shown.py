"""The commands that pages show: in fences of the shell, in indented blocks, and in sentences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?:bash|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)  # of any language
INDENTED = re.compile(r"^    \S.*\n(?:(?:    .*)?\n)*", re.MULTILINE)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )?murmurate [a-z][^`]*)`")
END = re.compile(r"[|&;<>]+")  # of a command


class Shown(NamedTuple):
    """A command of murmurate's: the page, the line of it, and the words after the program's name."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: murmurate {' '.join(self.words)}"


def pages() -> list[Path]:
    """All pages that a user reads; decisions and the change log tell of commands of their time."""
    found = [page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts]
    return [*sorted(found), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def lines(page: Path) -> list[str]:
    """The lines of the shell that a page shows, with those that end in a backslash joined."""
    return [line for _, line in numbered(page.read_text())]


def numbered(text: str) -> Iterator[tuple[int, str]]:
    bare = FENCED.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for pattern, part in ((FENCE, text), (INDENTED, bare)):
        for block in pattern.finditer(part):
            number = part.count("\n", 0, block.start()) + 1 + (pattern is FENCE)
            body = block[1] if pattern is FENCE else re.sub("(?m)^    ", "", block[0])
            while body:
                line, _, body = body.partition("\n")
                first = number
                number += 1
                while line.endswith("\\"):
                    more, _, body = body.partition("\n")
                    line, number = f"{line[:-1].rstrip()} {more.strip()}", number + 1
                yield first, line


def shown(page: Path) -> list[Shown]:
    """The commands of a page, in its order: those of blocks, then those of sentences."""
    name, text = page.relative_to(ROOT).as_posix(), page.read_text()
    found = []
    for number, line in numbered(text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # not of the shell
            continue
        found += [Shown(name, number, part) for part in commands(words) if part]
    for match in INLINE.finditer(text):
        words = match[1].replace("\n", " ").split()
        number = text.count("\n", 0, match.start()) + 1
        found += [Shown(name, number, part) for part in commands(words)]
    return found


def commands(words: list[str]) -> Iterator[tuple[str, ...]]:
    """What follows each ``murmurate``, up to the end of that command."""
    for index, word in enumerate(words):
        verb = words[index + 1 : index + 2]
        if word == "murmurate" and verb and re.fullmatch("[a-z]+", verb[0]):
            rest = words[index + 1 :]
            end = next((at for at, one in enumerate(rest) if END.fullmatch(one)), len(rest))
            yield tuple(rest[:end])
