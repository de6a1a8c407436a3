"""The record of a run as CSV and Parquet."""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from murmurate.errors import Refusal
from murmurate.record.report import write_html
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


def _page(folder: Path, out: Path) -> object:
    return write_html("<p>A page</p>", out)


_WRITERS = pytest.mark.parametrize("write", [write_csv, write_parquet, _page])


@_WRITERS
def test_a_pipe_is_written_to_and_stays(write: Callable[[Path, Path], object], folder: Path) -> None:
    if write is write_parquet:
        pytest.importorskip("pyarrow")
    write(folder, folder / "file")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with os.fdopen(os.open(folder / name, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as reader:
            write(folder, folder / name)
            assert reader.read() == (folder / "file").read_bytes()
    assert stat.S_ISFIFO((folder / "pipe").stat().st_mode)
    assert (folder / "link").is_symlink()
    assert not list(folder.glob("*.new"))


@_WRITERS
def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(
    write: Callable[[Path, Path], object], folder: Path
) -> None:
    if write is write_parquet:
        pytest.importorskip("pyarrow")
    write(folder, folder / "file")
    (folder / "elsewhere").mkdir()
    (folder / "link").symlink_to("elsewhere/file")
    for _ in range(2):  # the link leads to no file at first
        write(folder, folder / "link")
        assert os.readlink(folder / "link") == "elsewhere/file"
        assert (folder / "elsewhere" / "file").read_bytes() == (folder / "file").read_bytes()
        assert [path.name for path in (folder / "elsewhere").iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "record.csv").write_text("old")

    def full(*_: object) -> None:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr("murmurate.record.table._cell", full)
        with pytest.raises(OSError):
            write_csv(folder, folder / "record.csv")
    assert {path.name: path.read_text() for path in folder.glob("record*")} == {"record.csv": "old"}


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
