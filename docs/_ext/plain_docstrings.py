"""The package's docstrings as reStructuredText.

Fields of a dataclass are described in running text, ``name: sentence.``; here they become a list. Lines with
a hanging indentation lose it, because reStructuredText would take them for a quotation.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from murmurate.errors import MissingExtra


def _fields(obj: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(obj)] if dataclasses.is_dataclass(obj) else []


def _without_hanging_indent(lines: list[str]) -> list[str]:
    """``lines`` without indentation, except in sections (``Args:``) and literal blocks."""
    plain: list[str] = []
    in_block = False
    for line in lines:
        if line and not line.startswith(" "):
            in_block = line.endswith("::") or bool(
                re.match(r"(Args|Returns|Raises|Yields|Attributes):$", line)
            )
        # "n_iter_: passes" within a line would be a reference to "n_iter"
        line = re.sub(r"(?<=\. )(\w+)_(?=: )", r"\1\_", line)
        plain.append(line if in_block else line.strip())
    return plain


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = "\n".join(_without_hanging_indent(lines))
    names = "|".join(map(re.escape, _fields(obj)))
    if not names:
        lines[:] = text.split("\n")
        return
    intro, *pieces = re.split(rf"(?:^|(?<=[.:]\s))({names}): ", text, flags=re.MULTILINE)
    blocks = [intro, ""]
    for field, about in zip(pieces[::2], pieces[1::2], strict=True):
        paragraph, _, rest = about.partition("\n\n")
        blocks += [f"* **{field}**: {' '.join(paragraph.split())}", *(["", rest, ""] if rest else [])]
    lines[:] = "\n".join(blocks).split("\n")


class _Api(SphinxDirective):
    """``{api}``: signatures and docstrings of the names in its lines; a name with "?" need not exist, or may
    need an extra that is not installed."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        return [node for name in self.content for node in self._entry(name.strip())]

    def _entry(self, name: str) -> list[nodes.Node]:
        module, _, attribute = name.rstrip("?").rpartition(".")
        try:
            documented = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, MissingExtra):
            if name.endswith("?"):
                return []
            raise
        kind = "class" if inspect.isclass(documented) else "function"
        members = "   :members:\n" * inspect.isclass(documented)
        if requests := [name for name in dir(documented) if re.match(r"set_\w+_request$", name)]:
            members += (
                f"   :exclude-members: {', '.join(requests)}\n"  # which scikit-learn adds to estimators
            )
        return self.parse_text_to_nodes(
            f"```{{eval-rst}}\n.. auto{kind}:: {module}.{attribute}\n{members}```\n"
        )


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api", _Api)
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # runs before napoleon's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
