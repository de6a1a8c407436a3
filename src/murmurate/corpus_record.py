"""What a run folder knows of its corpus: the words, the size, and how another one is told from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from murmurate.collect.documents import CorpusWorld
from murmurate.collect.interface import ExampleWorld, World
from murmurate.errors import Refusal
from murmurate.folder import write_json
from murmurate.spec import EnvSpec
from murmurate.workloads.corpus import Corpus

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
            raise Refusal(
                f"{world.path} has changed since the run was fitted on it: {self.documents:,} documents over "
                f"{self.vocabulary_size:,} words then, {now.documents:,} over {now.vocabulary_size:,} now, "
                "and not the same ones. Put it back as it was, or fit anew with --out."
            )


def write_record(folder: Path, world: World | ExampleWorld) -> None:
    """Once, before anybody learns in ``folder``. Raises Refusal for a corpus that cannot be read."""
    if isinstance(world, CorpusWorld):
        write_json(folder / _FILE, asdict(CorpusRecord.of(world.whole())))


def read_record(folder: Path, world: CorpusWorld) -> CorpusRecord:
    """Of a run folder; of the corpus as it is now where an older version fitted. Raises Refusal."""
    path = folder / _FILE
    try:
        stored = json.loads(path.read_text())
        words = stored["vocabulary"]
        vocabulary = None if words is None else tuple(map(str, words))
        sizes = int(stored["documents"]), int(stored["vocabulary_size"])
        return CorpusRecord(stored["digest"], *sizes, vocabulary)
    except FileNotFoundError:
        return CorpusRecord.of(world.whole())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"{path} cannot be read ({error}). Delete it, if the corpus is as it was when the run began."
        ) from error


def refuse_another(folder: Path, world: World | ExampleWorld) -> None:
    """Raises Refusal where ``world`` has not the corpus that the run in ``folder`` was fitted on."""
    if isinstance(world, CorpusWorld):
        read_record(folder, world).check(world)
