"""The record of a run as a table: CSV, or Parquet for data frames."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from murmurate.errors import MissingExtra, Refusal, cause_of
from murmurate.record.reader import read_metrics
from murmurate.record.stored import output

_COMMON = ("time_seconds", "replica", "env_steps", "updates", "kind", "event", "message")


def columns(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields of all records: first the common ones, then the others in the order of appearance."""
    names = dict.fromkeys(name for record in records for name in record)
    return [name for name in _COMMON if name in names] + [name for name in names if name not in _COMMON]


def write_csv(folder: Path, path: Path) -> int:
    """Write the record of the run in ``folder``, one row for each line of ``metrics.jsonl``; returns how
    many rows.

    Columns are the fields (docs/metrics.md), whose names hold their units. A field that a record does not
    have is empty; lists and mappings are JSON. Raises Refusal where there is no record, and for a ``path``
    that is a folder or in none.
    """
    records = _records(folder)
    names = columns(records)
    _check(path)
    with output(path) as target, target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([_cell(record.get(name)) for name in names] for record in records)
    return len(records)


def write_parquet(folder: Path, path: Path) -> int:
    """As ``write_csv``, with numbers as int64 and float64 (a value that was not finite is null, and named in
    ``not_finite``). Raises MissingExtra without pyarrow."""
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtra("pyarrow", "parquet", "Writing Parquet")
    import pyarrow
    import pyarrow.parquet

    records = _records(folder)
    table = {name: _column([record.get(name) for record in records]) for name in columns(records)}
    _check(path)
    content = io.BytesIO()  # pyarrow would seek in the file, and remove it after an error, even a device
    pyarrow.parquet.write_table(pyarrow.table(table), content)
    with output(path) as target:
        target.write_bytes(content.getbuffer())
    return len(records)


def _records(folder: Path) -> list[dict[str, Any]]:
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except OSError as error:
        raise Refusal(
            f"{folder} has no record (metrics.jsonl: {cause_of(error)}). Check the path."
        ) from error
    if not records:
        raise Refusal(f"{folder} has recorded nothing yet.")
    return records


def _check(path: Path) -> None:
    """Raise Refusal if ``path`` names no file: it is a folder, or its folder is missing."""
    if not path.parent.is_dir():
        raise Refusal(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
    if path.is_dir() or not path.name:
        raise Refusal(f"{path} cannot be written: it is a folder. Name a file.")


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else value


def _column(values: Sequence[Any]) -> list[Any]:
    """``values`` as one type: integers, booleans, numbers or text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int} or kinds <= {bool} or kinds <= {str}:
        return list(values)
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values]
    return [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
