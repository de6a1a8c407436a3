"""What a run folder knows of its corpus or table: words, size, and how another one is told from it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

from murmurate.datasets.corpus import Corpus
from murmurate.datasets.table import Table
from murmurate.datasets.table_world import TableWorld
from murmurate.datasets.tokens import VERSION
from murmurate.errors import Refusal
from murmurate.sources.examples import CorpusWorld
from murmurate.spec import EnvSpec
from murmurate.training.run_folder import write_json
from murmurate.worlds.interface import ExampleWorld, World

_FILE = "source.json"


@dataclass(frozen=True)
class CorpusRecord:
    """Of a corpus of D documents over V words: ``source.json`` of its run's folder.

    digest: of its documents and words. vocabulary: V words, or None where there are only ids. tokeniser: the
    version that made words of it, if it was text.
    """

    digest: str | None
    documents: int  # D
    vocabulary_size: int  # V
    vocabulary: tuple[str, ...] | None
    tokeniser: int = field(default=VERSION, compare=False)

    @classmethod
    def of(cls, corpus: Corpus) -> CorpusRecord:
        return cls(corpus.digest, len(corpus), corpus.vocabulary_size, corpus.vocabulary)

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> CorpusRecord:
        words = stored["vocabulary"]
        return cls(
            stored["digest"],
            int(stored["documents"]),
            int(stored["vocabulary_size"]),
            None if words is None else tuple(map(str, words)),
            int(stored.get("tokeniser", 1)),
        )

    def spec(self, world: CorpusWorld) -> EnvSpec:
        """What a topic model must know of it."""
        return world.spec_of(self.documents, self.vocabulary_size)

    def check(self, world: CorpusWorld, thorough: bool = True) -> None:
        """Raises Refusal where ``world`` has another corpus by now, or none. Its digest costs nothing."""
        now = CorpusRecord.of(world.whole())
        if now == self:
            return
        if now.tokeniser != self.tokeniser and world.is_text:
            raise Refusal(
                f"{world.path} falls into other words since murmurate counts the signs on letters to their "
                "word, and the run knows the old ones. Fit anew with --out."
            )
        if now.vocabulary is None and self.vocabulary is not None:
            raise Refusal(
                f"The words of {world.path} are not there, with which the run was fitted. Put the vocabulary "
                "beside it again, or say where it is: murmurate resume DIR --world.vocabulary FILE."
            )
        raise _another(
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

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> TableRecord:
        return cls(str(stored["digest"]), int(stored["rows"]), int(stored["columns"]))

    def spec(self, world: TableWorld) -> EnvSpec:
        """What a mixture must know of it."""
        return world.spec_of(self.rows, self.columns)

    def check(self, world: TableWorld, thorough: bool = True) -> None:
        """Raises Refusal where ``world`` has another table by now, or none. thorough: look at all numbers
        too, a second for 600 MB."""
        now = world.whole()
        shape = (len(now), now.columns)
        if shape != (self.rows, self.columns) or (thorough and now.digest != self.digest):
            raise _another(
                world.path, f"{self.rows:,} rows of {self.columns:,}", "{:,} of {:,}".format(*shape)
            )


def _told(option: str) -> str:
    """The command that says where something is by now."""
    return f"murmurate resume DIR --world.{option.replace('_', '-')} NEW"


def _another(path: str, then: str, now: str) -> Refusal:
    return Refusal(
        f"{path} is not what the run was fitted on: {then} then, {now} now, and not the same ones. Put it "
        f"back as it was, say where that is by now ({_told('path')}), or fit anew with --out."
    )


def write_record(folder: Path, world: World | ExampleWorld) -> None:
    """Once, before anybody learns in ``folder``. Raises Refusal for a corpus or table that cannot be read."""
    if isinstance(world, ExampleWorld) and not (folder / _FILE).exists():
        write_json(folder / _FILE, asdict(_now(world)))


def _now(world: ExampleWorld) -> CorpusRecord | TableRecord:
    if isinstance(world, CorpusWorld):
        return CorpusRecord.of(world.whole())
    return TableRecord.of(world.whole())


@overload
def read_record(folder: Path, world: CorpusWorld) -> CorpusRecord: ...


@overload
def read_record(folder: Path, world: TableWorld) -> TableRecord: ...


def read_record(folder: Path, world: ExampleWorld) -> CorpusRecord | TableRecord:
    """Of a run folder; of what is there now where an older version fitted. Raises Refusal."""
    with _telling(folder):
        try:
            stored = json.loads((folder / _FILE).read_text())
        except FileNotFoundError:
            stored = None
        if stored is not None:
            return (CorpusRecord if isinstance(world, CorpusWorld) else TableRecord).restored(stored)
    return _now(world)


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
    folder: Path,
    world: World | ExampleWorld,
    stored: World | ExampleWorld | None = None,
    *,
    thorough: bool = True,
) -> None:
    """Raises Refusal where ``world`` has not what the run in ``folder`` was fitted on.

    stored: the world as the run knows it, where that may lie elsewhere. thorough: as ``TableRecord.check``.
    """
    if not isinstance(world, ExampleWorld):
        return
    known: Any = world if stored is None else stored
    if not (folder / _FILE).exists() and not Path(known.path).exists():
        warnings.warn(
            f"{folder} is of an older version, which kept nothing of its {world.name}: whether {world.path} "
            "is what it was fitted on is for you to know.",
            stacklevel=2,
        )
    else:
        read_record(folder, known).check(world, thorough)


def refuse_missing(world: World | ExampleWorld) -> None:
    """Raises Refusal where something that a run was fitted with is not where it was."""
    if not isinstance(world, ExampleWorld):
        return
    for option in ("path", "vocabulary", "stop_words"):
        place = getattr(world, option, None)
        if place and not Path(place).exists():
            raise Refusal(
                f"There is no {place}, with which the run was fitted. Say where it is now: {_told(option)}."
            )
