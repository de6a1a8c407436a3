"""Writes the tables of ``README.md``, and the figures in prose, from ``results/*.json``.

``python benchmarks/render.py`` rewrites the pages. The newest result of each benchmark comes first. Results
are files named ``YYYY-MM-DD-<bench>.json`` that hold the last line of ``murmurate bench NAME --json``.

A figure in prose, on this page, in the README or in ``docs/``, is written as

    <!--figure 2026-11-21-topics ratio_gensim .1f-->10.2<!--end-->

with the name of the result's file, the path to the figure in it (where an item of a list is its number) and
Python's format. A factor before the format multiplies the figure (``100*.0f`` for per cent); ``path / path``
is a ratio of two figures. A figure that is null in the result is shown as "never reached".
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from render_tables import NEVER_REACHED, tables

HERE = Path(__file__).parent
BEGIN, END = "<!-- results: written by render.py -->", "<!-- end of results -->"


def rewrite(page: str, fresh: str) -> str:
    """``page`` with the text between the two marks replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{fresh}\n{END}{after}"


_FIGURE = re.compile(
    r"(?P<begin><!--figure\s+(?P<file>\S+)\s+(?P<path>(?:(?!-->).)+?)\s+"
    r"(?:(?P<factor>[\d.e+-]+)\*)?(?P<format>[^\s>]+?)-->)"
    r"(?:(?!<!--figure).)*?(?P<end><!--end-->)",
    re.DOTALL,
)


def pages(root: Path) -> list[Path]:
    """The pages of a checkout whose figures are rendered."""
    return [root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").rglob("*.md"))]


def with_figures(page: str, results: Path) -> str:
    """``page`` with every figure as its result has it.

    Raises FileNotFoundError for a result that is not there, KeyError or IndexError for a figure that its
    result lacks, and ValueError for a mark that does not end, or whose format does not fit the figure.
    """

    def figure(match: re.Match[str]) -> str:
        result = json.loads((results / f"{match['file']}.json").read_text())
        value, *over = (_figure_at(result, path) for path in match["path"].split(" / "))
        if value is None or None in over:
            return match["begin"] + NEVER_REACHED + match["end"]
        for divisor in over:
            value /= divisor
        factor = float(match["factor"] or 1)
        text = format(value * factor if factor != 1 else value, match["format"])
        return match["begin"] + text + match["end"]

    rendered, count = _FIGURE.subn(figure, page)
    if count != page.count("<!--figure"):
        raise ValueError(f"{page.count('<!--figure')} figures begin, and only {count} end with <!--end-->")
    return rendered


def _figure_at(result: Any, path: str) -> Any:
    """The figure at a path. Raises KeyError or IndexError if there is none."""
    for key in path.split("."):
        result = result[int(key)] if isinstance(result, list) else result[key]
    return result


def main(folder: Path) -> None:
    results = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    page = folder / "README.md"
    page.write_text(rewrite(page.read_text(), tables(r for r in results if "bench" in r)))
    for prose in pages(folder.parent):
        if prose.exists():
            prose.write_text(with_figures(prose.read_text(), folder / "results"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Rewrite the tables and figures of the pages from the results."
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=HERE, help="folder with README.md and results/"
    )
    main(parser.parse_args().folder)
