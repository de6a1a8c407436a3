"""The prose of a Markdown text: without code blocks, HTML, addresses of links and front matter."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

_LINE_BREAK = re.compile(r"<br[\s/>]", re.IGNORECASE)
# a line of --- before a blank line is a rule
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?![ \t]*\n)(?:.*?\n)??(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)


def prose(text: str) -> str:
    """The text that a reader of the rendered page sees, with inline code but without code blocks."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    return "\n".join(_blocks(_parser().parse(_FRONT_MATTER.sub("", text))))


@functools.cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark").enable("table")


def _blocks(tokens: Iterable[Token]) -> Iterator[str]:
    for token in tokens:
        if token.type == "inline":
            yield "".join(_inline(token.children or []))


def _inline(tokens: Iterable[Token]) -> Iterator[str]:
    for token in tokens:
        if token.type in ("text", "code_inline"):
            yield token.content
        elif token.type in ("softbreak", "hardbreak") or _is_line_break(token):
            yield " "
        elif token.type == "image":
            yield from _inline(token.children or [])


def _is_line_break(token: Token) -> bool:
    return token.type == "html_inline" and _LINE_BREAK.match(token.content) is not None
