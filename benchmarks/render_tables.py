"""For ``render.py``: the results as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import render_learning
import render_members
from render_columns import COLUMNS, Columns, Rows, Table

# there is a table for each result (for a part of a benchmark, only if the result has it)
TABLES: dict[str, Table] = {**render_learning.TABLES, **render_members.TABLES}

NOT_MEASURED, NEVER_REACHED = "not measured", "never reached"
# what a null means in a result: a time to a goal that was not reached is a finding, not a gap
NULLS = {
    "hsa2c-scaling": NEVER_REACHED,
    "topics-speedup": NEVER_REACHED,
    "topics": NEVER_REACHED,
    "plan-target": NEVER_REACHED,  # a ratio to or of runs that missed the target
    "every-strategy": "one replica",  # and so no disagreement
}


def at(result: Any, path: str) -> Any:
    """The figure at a path; None where the result has null, and "not measured" where it has no such path."""
    for key in path.split("."):
        if not isinstance(result, dict) or key not in result:
            return NOT_MEASURED
        result = result[key]
    return result


def cell(value: Any, null: str = NOT_MEASURED) -> str:
    if value is None:
        return null
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def tables(results: Iterable[dict[str, Any]]) -> str:
    """A table for each benchmark of COLUMNS, with a line for each result, and for each result of TABLES a
    table; the newest first."""
    by_bench: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda r: str(r["date"]), reverse=True):
        by_bench.setdefault(result["bench"], []).append(result)
    out = []
    for bench, columns in COLUMNS.items():
        if bench not in by_bench:
            out.append(f"### {bench}\n\nNo result yet.\n")
            continue
        null = NULLS.get(bench, NOT_MEASURED)
        heads = ["date", "hardware", *(heading for heading, _ in columns)]
        cells = [
            [result["date"][:10], _machine(result), *_cells(result, columns, null)]
            for result in by_bench[bench]
        ]
        out.append(f"### {bench}\n\n{_markdown(heads, cells)}")
    for bench, (first, rows, columns) in TABLES.items():
        out.append(f"### {bench}\n")
        name, _, part = bench.partition(", ")
        found = [(result, rows(result)) for result in by_bench.get(name, [])]
        shown = [(result, lines) for result, lines in found if lines or not part]
        out.extend(_table(result, first, lines, columns) for result, lines in shown)
        if not shown:
            out.append("No result yet.\n")
    return "\n".join(out)


def _machine(result: dict[str, Any]) -> str:
    machine = result["hardware"]
    return ", ".join([f"{machine['cores']} x {machine['cpu']}", *machine.get("gpus", ())])


def _table(result: dict[str, Any], first: str, rows: Rows, columns: Columns) -> str:
    null = NULLS.get(result["bench"], NOT_MEASURED)
    cells = [[label, *_cells(row, columns, null)] for label, row in rows]
    source = f"{result['date'][:10]}, {_machine(result)}: `{result['command']}`"
    return f"{source}\n\n{_markdown([first, *(heading for heading, _ in columns)], cells)}"


def _cells(figures: Any, columns: Columns, null: str) -> list[str]:
    return [cell(at(figures, path), null) for _, path in columns]


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]]) + "\n"
