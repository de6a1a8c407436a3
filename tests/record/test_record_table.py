"""The record of a run as CSV and Parquet."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from murmurate.errors import Refusal
from murmurate.record.table import write_csv, write_parquet

RECORDS = [
    {"time_seconds": 0.5, "env_steps": 10, "updates": 1, "replica": 0, "loss": 1,
     "episode_returns": [[3.0, 3]]},
    {"time_seconds": 0.75, "env_steps": 20, "updates": 2, "replica": 1, "loss": 0.25},
    {"time_seconds": 1.0, "env_steps": 30, "updates": 0, "replica": None, "kind": "event", "event": "died",
     "message": 'replica 1, "lost"'},
]  # fmt: skip
COLUMNS = [
    "time_seconds", "replica", "env_steps", "updates", "kind", "event", "message", "loss", "episode_returns",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [json.dumps(record, separators=(",", ":")) for record in RECORDS]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_csv_has_a_row_for_each_record_and_a_column_for_each_field(folder: Path) -> None:
    assert write_csv(folder, folder / "record.csv") == 3
    with (folder / "record.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == COLUMNS
    assert rows == [
        ["0.5", "0", "10", "1", "", "", "", "1", "[[3.0, 3]]"],
        ["0.75", "1", "20", "2", "", "", "", "0.25", ""],
        ["1.0", "", "30", "0", "event", "died", 'replica 1, "lost"', "", ""],
    ]


def test_parquet_has_the_same_with_types(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert write_parquet(folder, folder / "record.parquet") == 3
    table = parquet.read_table(folder / "record.parquet")
    assert table.column_names == COLUMNS
    kinds = {name: str(table.schema.field(name).type) for name in COLUMNS}
    assert (kinds["time_seconds"], kinds["env_steps"], kinds["loss"]) == ("double", "int64", "double")
    assert table.column("loss").to_pylist() == [1.0, 0.25, None]
    assert table.column("replica").to_pylist() == [0, 1, None]
    assert table.column("episode_returns").to_pylist() == ["[[3.0, 3]]", None, None]


def test_what_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="there is no folder"):
        write_csv(folder, folder / "nowhere" / "record.csv")
    with pytest.raises(Refusal, match="has no record"):
        write_csv(tmp_path / "other", folder / "record.csv")
    for named in (Path(), folder):
        with pytest.raises(Refusal, match="it is a folder"):
            write_csv(folder, named)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(Refusal, match="nothing yet"):
        write_csv(folder, folder / "record.csv")
    assert not (folder / "record.csv").exists()
