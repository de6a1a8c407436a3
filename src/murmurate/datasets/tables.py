"""A table of numbers as what is learned from."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from murmurate.datasets.table import Table, read_table
from murmurate.errors import Refusal
from murmurate.sources.examples import Chosen, divide
from murmurate.spec import EnvSpec


@dataclass(frozen=True)
class TableWorld:
    """Rows of numbers in a file (``.npy``, ``.npz``, or text such as ``.csv``), and which are kept back.

    path: of the file. validation, test: rows kept back, as a number or, below 1, as a share.
    split_seed: decides which ones.
    """

    path: str = ""
    validation: float = 0.02
    test: float = 0.05
    split_seed: int = 0

    name: ClassVar[str] = "table"
    holds: ClassVar[str] = "rows"

    def __post_init__(self) -> None:
        if self.path:  # a run goes on from other folders too
            object.__setattr__(self, "path", os.path.abspath(self.path))

    def without_places(self) -> TableWorld:
        """The same, wherever its file lies."""
        return dataclasses.replace(self, path="")

    def whole(self) -> Table:
        """All rows. Raises Refusal for a file that cannot be read."""
        return _read(self.path)

    def divided(self) -> tuple[Chosen[Table], Chosen[Table], Chosen[Table]]:
        """The rows (to learn from, to validate with, to test with)."""
        table = self.whole()
        train, validation, test = (Chosen(table, part) for part in divide(self, len(table)))
        return train, validation, test

    @property
    def spec(self) -> EnvSpec:
        """What a mixture must know: an observation is a row [D]."""
        table = self.whole()
        return self.spec_of(len(table), table.columns)

    def spec_of(self, rows: int, columns: int) -> EnvSpec:
        """``spec`` of a table of that size, without a look at it."""
        train, _, _ = divide(self, rows)
        return EnvSpec("table", (columns,), torch.float64, 0, documents=len(train))


@functools.lru_cache(maxsize=2)
def _read(path: str) -> Table:
    if not path:
        raise Refusal("say which table: murmurate train table-gmm --world.path TABLE.")
    return read_table(Path(path))
