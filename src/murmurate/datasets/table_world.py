"""A table of numbers as what is learned from."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from murmurate.datasets.interface import Split, Subset, divide, other_data
from murmurate.datasets.table import Table, read_table
from murmurate.errors import Refusal
from murmurate.spec import EnvSpec, World


@dataclass(frozen=True)
class TableWorld(World):
    """Rows of numbers in a file (``.npy``, ``.npz``, or text such as ``.csv``), and which are kept back.

    path: of the file. validation, test: rows kept back, as a number or, below 1, as a share.
    split_seed: decides which ones.
    """

    path: str = field(default="", metadata={"place": True})
    validation: float = 0.02
    test: float = 0.05
    split_seed: int = 0

    name: ClassVar[str] = "table"
    unit: ClassVar[str] = "rows"

    def __post_init__(self) -> None:
        if self.path:  # a run goes on from other folders too
            object.__setattr__(self, "path", os.path.abspath(self.path))

    def whole(self) -> Table:
        """All rows. Raises Refusal for a file that cannot be read."""
        return _read(self.path)

    def divided(self) -> Split:
        table = self.whole()
        return Split(*(Subset(table, part) for part in divide(self, len(table))))

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        """What a mixture must know: an observation is a row [D]."""
        if fingerprint is None:  # its digest, which reads all numbers, is not needed here
            table = self.whole()
            rows, columns = len(table), table.columns
        else:
            rows, columns = int(fingerprint["rows"]), int(fingerprint["columns"])
        train, _, _ = divide(self, rows)
        return EnvSpec("table", (columns,), torch.float64, 0, examples=len(train))

    def fingerprint(self) -> dict[str, Any]:
        """digest: of the numbers. rows: n. columns: D."""
        table = self.whole()
        return {"digest": table.digest, "rows": len(table), "columns": table.columns}

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        """thorough: look at all numbers too, a second for 600 MB."""
        table = self.whole()
        then, now = (int(fingerprint["rows"]), int(fingerprint["columns"])), (len(table), table.columns)
        if then != now or (thorough and table.digest != fingerprint["digest"]):
            raise other_data(self.path, "{:,} rows of {:,}".format(*then), "{:,} of {:,}".format(*now))


@functools.lru_cache(maxsize=2)
def _read(path: str) -> Table:
    if not path:
        raise Refusal("say which table: murmurate train table-gmm --world.path TABLE.")
    return read_table(Path(path))
