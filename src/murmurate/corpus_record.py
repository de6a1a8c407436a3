"""What a run folder knows of its corpus or table: words, size, and how another one is told from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from murmurate.collect.documents import CorpusWorld
from murmurate.collect.interface import ExampleWorld, World
from murmurate.collect.tables import TableWorld
from murmurate.errors import Refusal
from murmurate.folder import write_json
from murmurate.spec import EnvSpec
from murmurate.workloads.corpus import Corpus
from murmurate.workloads.table import Table

_FILE = "source.json"


@dataclass(frozen=True)
class CorpusRecord:
    """Of a corpus of D documents over V words: ``source.json`` of its run's folder.

    digest: of its documents and words. vocabulary: V words, or None where there are only ids.
    """

    digest: str | None
    documents: int  # D
    vocabulary_size: int  # V
    vocabulary: tuple[str, ...] | None

    @classmethod
    def of(cls, corpus: Corpus) -> CorpusRecord:
        return cls(corpus.digest, len(corpus), corpus.vocabulary_size, corpus.vocabulary)

    def spec(self, world: CorpusWorld) -> EnvSpec:
        """What a topic model must know of it."""
        return world.spec_of(self.documents, self.vocabulary_size)

    def check(self, world: CorpusWorld) -> None:
        """Raises Refusal where ``world`` has another corpus by now, or none."""
        now = CorpusRecord.of(world.whole())
        if now != self:
            _refuse(
                world.path,
                f"{self.documents:,} documents over {self.vocabulary_size:,} words",
                f"{now.documents:,} over {now.vocabulary_size:,}",
            )


@dataclass(frozen=True)
class TableRecord:
    """Of a table of n rows of D numbers: ``source.json`` of its run's folder. digest: of the numbers."""

    digest: str
    rows: int  # n
    columns: int  # D

    @classmethod
    def of(cls, table: Table) -> TableRecord:
        return cls(table.digest, len(table), table.columns)

    def check(self, world: TableWorld) -> None:
        """Raises Refusal where ``world`` has another table by now, or none."""
        now = TableRecord.of(world.whole())
        if now != self:
            _refuse(world.path, f"{self.rows:,} rows of {self.columns:,}", f"{now.rows:,} of {now.columns:,}")


def _refuse(path: str, then: str, now: str) -> NoReturn:
    raise Refusal(
        f"{path} is not what the run was fitted on: {then} then, {now} now, and not the same ones. Put it "
        "back as it was, say with --world.path where it lies by now, or fit anew with --out."
    )


def write_record(folder: Path, world: World | ExampleWorld) -> None:
    """Once, before anybody learns in ``folder``. Raises Refusal for a corpus or table that cannot be read."""
    if isinstance(world, CorpusWorld):
        write_json(folder / _FILE, asdict(CorpusRecord.of(world.whole())))
    elif isinstance(world, TableWorld):
        write_json(folder / _FILE, asdict(TableRecord.of(world.whole())))


def read_record(folder: Path, world: CorpusWorld) -> CorpusRecord:
    """Of a run folder; of the corpus as it is now where an older version fitted. Raises Refusal."""
    stored = _stored(folder)
    if stored is None:
        return CorpusRecord.of(world.whole())
    with _telling(folder):
        words = stored["vocabulary"]
        vocabulary = None if words is None else tuple(map(str, words))
        sizes = int(stored["documents"]), int(stored["vocabulary_size"])
        return CorpusRecord(stored["digest"], *sizes, vocabulary)


def _read_table_record(folder: Path, world: TableWorld) -> TableRecord:
    stored = _stored(folder)
    if stored is None:
        return TableRecord.of(world.whole())
    with _telling(folder):
        return TableRecord(str(stored["digest"]), int(stored["rows"]), int(stored["columns"]))


def _stored(folder: Path) -> Any:
    with _telling(folder):
        try:
            return json.loads((folder / _FILE).read_text())
        except FileNotFoundError:
            return None


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"{folder / _FILE} cannot be read ({error}). Delete it, if what it tells of is as it was when "
            "the run began."
        ) from error


def refuse_another(
    folder: Path, world: World | ExampleWorld, stored: World | ExampleWorld | None = None
) -> None:
    """Raises Refusal where ``world`` has not what the run in ``folder`` was fitted on.

    stored: the world as the run knows it, where that may lie elsewhere.
    """
    if isinstance(world, CorpusWorld):
        known = stored if isinstance(stored, CorpusWorld) else world
        read_record(folder, known).check(world)
    elif isinstance(world, TableWorld):
        before = stored if isinstance(stored, TableWorld) else world
        _read_table_record(folder, before).check(world)


def refuse_missing(world: World | ExampleWorld) -> None:
    """Raises Refusal where what a run was fitted on is not where it was."""
    if isinstance(world, ExampleWorld) and world.path and not Path(world.path).exists():
        raise Refusal(
            f"There is no {world.path}, which the run was fitted on. Say with --world.path where it is now."
        )
