"""Tables of what the package finds by listing its folders: strategies, agents, models and recipes.

Each row links to the page in ``algorithms`` that names the row's source file. A row without such a page is a
warning, and so an error of a strict build.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from murmurate import plugins
from murmurate.recipes import summaries
from murmurate.strategies import strategies

_LOG = logging.getLogger(__name__)
_ALGORITHMS = Path(__file__).resolve().parents[1] / "algorithms"


@functools.cache
def _files_of_pages() -> dict[str, set[str]]:
    """Page -> the files that it names as its code, such as ``strategies/gala.py``."""
    files_by_page = {}
    for page in sorted(_ALGORITHMS.glob("*.md")):
        text = re.sub(r"\s+", " ", page.read_text())
        files = set()
        for span in re.findall(r"`([^`]*\.py[^`]*)`", text):
            folder = ""
            for path in re.findall(r"[\w/]+\.py", span):  # `agents/td3.py, ddpg.py`: one folder, two files
                named_folder, slash, name = path.rpartition("/")
                folder = named_folder if slash else folder
                files.add(f"{folder}/{name}")
        files_by_page[page.stem] = files
    return files_by_page


def page_of(module: str) -> str | None:
    """The page that names the file of ``module`` as its code; of several, the page that names the fewest
    files."""
    file = module.removeprefix("murmurate.").replace(".", "/") + ".py"
    pages = [page for page, files in _files_of_pages().items() if file in files]
    return min(pages, key=lambda page: len(_files_of_pages()[page]), default=None)


def _name(name: str, module: str) -> str:
    page = page_of(module)
    if page is None:
        _LOG.warning("'%s' has no page: name %s in one below docs/algorithms", name, module)
        return f"`{name}`"
    return f"[`{name}`](/algorithms/{page}.md)"


def _strategies() -> Iterator[tuple[str, ...]]:
    yield "strategy", "its step, in words", "needs", "staleness is bounded by", "a peer dies", "paper"
    for name, kind in strategies().items():
        if kind.__module__.startswith("murmurate."):
            needs = ", ".join(sorted(need.value for need in kind().needs))
            behaviour = kind.behaviour
            about = kind.summary, needs, behaviour.bounded_by, behaviour.on_death, kind.paper
            yield _name(name, kind.__module__), *about


def _learners(package: str) -> Iterator[tuple[str, ...]]:
    yield "name", "what it is", "options"
    for module in plugins.modules(package):
        for kind in vars(module).values():
            config = isinstance(kind, type) and dataclasses.is_dataclass(kind) and "summary" in vars(kind)
            if config and kind.__module__ == module.__name__ and module.__name__.startswith("murmurate."):
                options = f"[options](/reference/options.md#{kind.name})"
                yield _name(kind.name, module.__name__), kind.summary, options


def _recipes() -> Iterator[tuple[str, ...]]:
    yield "algorithm", "what it is"
    for name, summary in summaries().items():
        yield _name(name, f"murmurate.recipes.{name.replace('-', '_')}"), summary


_TABLES = {
    "strategies": _strategies,
    "agents": lambda: _learners("murmurate.agents"),
    "models": lambda: _learners("murmurate.workloads"),
    "recipes": _recipes,
}


def table(rows: Iterator[tuple[str, ...]]) -> str:
    """Rows, the first of which are the headings, as a table of Markdown."""
    head, *body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


class _Table(SphinxDirective):
    """``{registry} strategies``: the table of a registry."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(table(_TABLES[self.arguments[0]]()))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("registry", _Table)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
