"""A data set of the rows of a table."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from murmurate.datasets._files import state_of
from murmurate.datasets.interface import Split, Subset, other_data, split_indices
from murmurate.datasets.table import Table, read_table
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, Seed
from murmurate.spec import EnvSpec, World


@dataclass(frozen=True)
class TableWorld(World):
    """Rows of numbers in a file (``.npy``, ``.npz``, or text such as ``.csv``), and which rows are held out.

    path: path of the file. columns: the columns that are taken, in this order, by their names or numbers
        (from 0); none: all. validation, test: rows held out, as a number or, below 1, as a share.
    split_seed: seed of the random choice of rows that are held out.
    """

    path: str = field(default="", metadata={"place": True})
    validation: NonNegativeFloat = 0.02
    test: NonNegativeFloat = 0.05
    split_seed: Seed = 0
    columns: tuple[str, ...] = field(default=(), metadata={"since": 9})

    name: ClassVar[str] = "table"
    unit: ClassVar[str] = "rows"

    def __post_init__(self) -> None:
        if self.path:  # a run may be resumed from another folder
            object.__setattr__(self, "path", os.path.abspath(self.path))

    def load(self) -> Table:
        """All rows. Raises Refusal for a file that cannot be read."""
        return _read(self.path, self.columns, state_of(self.path))

    def divided(self) -> Split:
        table = self.load()
        return Split(*(Subset(table, part) for part in self._split(len(table))))

    def _split(self, rows: int) -> tuple[NDArray[np.int64], ...]:
        return split_indices(rows, self.validation, self.test, self.split_seed)

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        """An observation is a row [D]."""
        if fingerprint is None:  # ``fingerprint()`` would read all numbers, for the digest
            table = self.load()
            rows, columns = len(table), table.columns
        else:
            rows, columns = int(fingerprint["rows"]), int(fingerprint["columns"])
        return EnvSpec("table", (columns,), torch.float64, 0, examples=len(self._split(rows)[0]))

    def fingerprint(self) -> dict[str, Any]:
        """digest: digest of the numbers. rows: n. columns: D."""
        table = self.load()
        return {"digest": table.digest, "rows": len(table), "columns": table.columns}

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        """Raise Refusal if this is another table. thorough: compare the digest too, which reads all numbers
        (1 s for 600 MB)."""
        table = self.load()
        then, now = (int(fingerprint["rows"]), int(fingerprint["columns"])), (len(table), table.columns)
        if then != now or (thorough and table.digest != fingerprint["digest"]):
            raise other_data(self.path, "{:,} rows of {:,}".format(*then), "{:,} of {:,}".format(*now))


@functools.lru_cache(maxsize=2)
def _read(path: str, columns: tuple[str, ...], state: str) -> Table:
    """state: ``state_of`` the file, for the cache: a changed file is read again."""
    if not path:
        raise Refusal(
            "say which table: murmurate train table-gmm --world.path TABLE (world={'path': 'TABLE'} in "
            "Python)."
        )
    return read_table(Path(path), columns)
