"""Reads the text in one column of a CSV file, or of a file with a JSON object on each line."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from murmurate.datasets._lines import Lines
from murmurate.datasets._record_errors import RecordErrors, not_utf8, quoted
from murmurate.errors import Refusal

_LONGEST_FIELD = 1 << 26  # characters
_DELIMITERS = ",;\t|"
_END = 2 * chr(0x10FFFF)  # ends what is read of a CSV file
Record = Mapping[str, Any]


def column_values(
    path: Path, kind: str, column: str | None, name_column: str | None, errors: RecordErrors
) -> Iterator[tuple[str, str]]:
    """(name, text) of each record of a ``csv`` or ``jsonl`` file; the text is "" where there is none.

    name: the value of ``name_column``, or the record's number, from 0. column: column of the text; may be
    None if the file has one column. Raises Refusal for a column that the first record lacks, or for none of
    several; the message lists the columns. Errors in records go to ``errors``.
    """
    records = _csv(path, (column, name_column), errors) if kind == "csv" else _jsonl(path, errors)
    chosen: str | None = None
    for number, (line, record) in enumerate(records):
        if chosen is None and record:
            chosen = _text_column(path, record, column, name_column)
        name = number if name_column is None else record.get(name_column)
        text = "" if chosen is None else _text(record, chosen, line, errors)
        yield ("" if name is None else str(name)), text


def _text_column(path: Path, first: Record, column: str | None, name_column: str | None) -> str:
    """The name of the column that holds the text. first: the first record. Raises Refusal."""
    columns = ", ".join(map(str, first))
    for option, wanted in (("--column", column), ("--name-column", name_column)):
        if wanted is not None and wanted not in first:
            raise Refusal(f"{path} has no column '{wanted}'. Its columns: {columns}. Name one with {option}.")
    if column is None and len(first) == 1:
        return next(iter(first))
    if column is None:
        longest = max(first, key=lambda name: len(str(first[name] or "")))
        raise Refusal(
            f"{path} has the columns {columns}. Say which holds the text, as in --column {longest} "
            f"(column={longest!r} in Python)."
        )
    return column


def _text(record: Record, column: str, line: int, errors: RecordErrors) -> str:
    if not record:  # the record had an error, which is already counted
        return ""
    value = record.get(column)
    if isinstance(value, str) and value.strip():
        return value
    if value is None or isinstance(value, str):
        errors.add(line, "empty document", f"column '{column}' is empty")
    else:
        errors.add(line, "not text", f"column '{column}' is {quoted(repr(value).encode())}, which is no text")
    return ""


def _csv(path: Path, wanted: tuple[str | None, ...], errors: RecordErrors) -> Iterator[tuple[int, Record]]:
    """(number of the row's last line, values by column) of each row below the header; no values where the row
    has an error. Raises Refusal where several columns have a name that is wanted, or all have the same."""
    with Lines(path, errors) as lines, long_fields():
        header = lines.line() or b""
        try:
            text = header.decode()
        except UnicodeDecodeError as error:  # it cannot be skipped
            raise errors.refusal(1, not_utf8(header, error.start), "Convert the file.") from None
        if not text.strip():
            raise errors.refusal(1, "there is no header", "A CSV file begins with the names of its columns.")
        suffix = Path(path.name.lower().removesuffix(".gz")).suffix
        delimiter = "\t" if suffix == ".tsv" else max(_DELIMITERS, key=text.count)
        try:
            columns = next(csv.reader([text], delimiter=delimiter, strict=True))
        except csv.Error as error:
            raise errors.refusal(
                1, f"the header is no row of CSV ({error})", "Save it again with one line a row, as UTF-8."
            ) from error
        for name in columns:
            if columns.count(name) > 1 and (name in wanted or len(set(columns)) == 1):
                detail = f"{columns.count(name)} columns are called '{name}'"
                raise errors.refusal(1, detail, "Give each another name.")
        faulty: set[int] = set()  # lines that are not UTF-8

        def decoded() -> Iterator[str]:
            for number, line in lines.numbered():
                text = _decoded(line, number, errors)
                if text is None:
                    faulty.add(number)
                    text = line.decode(errors="replace")  # its quotes still say where rows end
                yield text + "\n"
            yield _END + "\n"  # a field that is not closed swallows it

        rows = csv.reader(decoded(), delimiter=delimiter)
        line = 1
        while (row := _next_row(rows, errors)) != [_END]:
            if row is not None and row[-1].endswith(_END + "\n"):
                errors.add(line + 1, "malformed line", "a quote in it is not closed")
                yield line + 1, {}
                break
            before, line = line, 1 + rows.line_num  # a row may span several lines
            valid = row is not None and faulty.isdisjoint(range(before + 1, line + 1))
            faulty.clear()
            if row is not None and valid and len(row) != len(columns):
                detail = f"{len(row)} fields, and there are {len(columns)} columns"
                errors.add(line, "malformed line", detail)
                valid = False
            yield line, dict(zip(columns, row, strict=True)) if row is not None and valid else {}


def _next_row(rows: Any, errors: RecordErrors) -> list[str] | None:
    """The fields of the next row that is not blank, [_END] after the last; None for a row with an error."""
    try:
        row: list[str]
        for row in rows:
            if row:
                return row
    except csv.Error as error:
        errors.add(1 + rows.line_num, "malformed line", f"it is no row of CSV ({error})")
        return None
    return [_END]


def _jsonl(path: Path, errors: RecordErrors) -> Iterator[tuple[int, Record]]:
    """(line number, JSON object) of each line that is not blank; an empty object where the line has an
    error."""
    with Lines(path, errors) as lines:
        for number, line in lines.numbered():
            text = _decoded(line.removeprefix(codecs.BOM_UTF8), number, errors)
            if text is not None and not text.strip():
                continue
            record: Any = {}
            if text is not None:
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError):
                    record = None
                if not isinstance(record, dict) or not record:
                    detail = f"{quoted(line)} is no JSON object with a text in it"
                    errors.add(number, "malformed line", detail)
                    record = {}
            yield number, record


def _decoded(line: bytes, number: int, errors: RecordErrors) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        errors.add(number, "not UTF-8", not_utf8(line, error.start))
        return None


@contextmanager
def long_fields() -> Iterator[None]:
    """Raise the limit of Python's CSV reader, 131,072 characters a field, which texts exceed."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)
