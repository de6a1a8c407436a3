"""Seconds that a replay manager needs: its cycles (``TreeShape``) over its clock (from place and route)."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from murmurate.errors import Refusal
from murmurate.fpga.shape import TreeShape

TABLE = Path(__file__).with_name("place_and_route.json")
Provenance = Literal["measured-pnr", "interpolated-pnr", "assumed"]


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    """The committed results of ``place_and_route``, whose clocks are static timing estimates, without a
    board. Those without ``row_bits`` stored no rows."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text())
    return tuple({"row_bits": 0, **row} for row in rows)


@dataclass(frozen=True)
class ReplayManagerModel:
    """A replay manager of ``banks`` trees, each with a pipeline of its own; each index belongs to a random
    bank.

    speed: speed grade of the device. mhz: an assumed clock; None: the clock of the committed table, whose
    designs have one bank.

    Raises Refusal for fewer than one bank, and for ``mhz`` that is not above 0 and finite.
    """

    shape: TreeShape
    banks: int = 1
    device: str = "lfe5u-85f"
    speed: int = 6
    mhz: float | None = None

    def __post_init__(self) -> None:
        if self.banks < 1:
            raise Refusal(f"{self.banks} banks; use at least 1.")
        if self.mhz is not None and not 0 < self.mhz < math.inf:
            raise Refusal(f"mhz is {self.mhz}; use a positive clock, or None for that of the table.")

    @property
    def clock(self) -> tuple[float, Provenance]:
        """(Hz, how it is known): the clock of the best placement seed. Between two sizes of the table with
        the same fan-out, width, device and speed, it is the lower clock of the two. That several banks keep
        the clock of one is assumed.

        Raises Refusal for a size outside the table, unless ``mhz`` is given.
        """
        if self.mhz is not None:
            return 1e6 * self.mhz, "assumed"
        hertz, provenance = self._clock_of_one_bank()
        return hertz, provenance if self.banks == 1 else "assumed"

    def _clock_of_one_bank(self) -> tuple[float, Provenance]:
        best_mhz = self._best_mhz()
        if self.shape.leaves in best_mhz:
            return 1e6 * best_mhz[self.shape.leaves], "measured-pnr"
        below = [leaves for leaves in best_mhz if leaves < self.shape.leaves]
        above = [leaves for leaves in best_mhz if leaves > self.shape.leaves]
        if not below or not above:
            known = sorted(best_mhz)
            use = f"Use {known[0]} to {known[-1]} leaves, or give mhz" if known else "Give mhz"
            raise Refusal(
                f"the table of place and route has no clock for {self.shape.leaves} leaves of fan-out "
                f"{self.shape.fan_out} and width {self.shape.width} on {self.device} of speed grade "
                f"{self.speed}. {use}; murmurate fpga pnr finds it."
            )
        return 1e6 * min(best_mhz[max(below)], best_mhz[min(above)]), "interpolated-pnr"

    @property
    def block_rams(self) -> int:
        """Number of block RAMs: that of the smallest tree of the table with at least as many leaves, for each
        bank. Raises Refusal if there is none."""
        placed = [(row["leaves"], row["bram"]) for row in self._rows() if row["leaves"] >= self.shape.leaves]
        if not placed:
            raise Refusal(
                f"the table of place and route has no tree of {self.shape.leaves} leaves or more, of fan-out "
                f"{self.shape.fan_out} and width {self.shape.width}, on {self.device} of speed grade "
                f"{self.speed}. Use fewer leaves; murmurate fpga pnr finds the block RAM of a tree."
            )
        return self.banks * int(min(placed)[1])

    def _rows(self) -> list[dict[str, Any]]:
        """The table's results with this fan-out, width, device and speed, for a tree that stores no rows."""
        key = (self.shape.fan_out, self.shape.width, self.device, self.speed, 0)
        names = ("fan_out", "width", "device", "speed", "row_bits")
        return [row for row in table() if tuple(row[name] for name in names) == key]

    def _best_mhz(self) -> dict[int, float]:
        """The clock of the best placement seed of each size (number of leaves) in the table."""
        best: dict[int, float] = {}
        for row in self._rows():
            best[row["leaves"]] = max(row["mhz"], best.get(row["leaves"], 0.0))
        return best

    def sample_seconds(self, batch: int) -> float:
        return (self._fullest(batch) + self.shape.sample_latency) / self.clock[0]

    def update_seconds(self, batch: int) -> float:
        return (self._fullest(batch) + self.shape.update_latency) / self.clock[0]

    def _fullest(self, batch: int) -> float:
        """Expected number of operations of the bank with most of them: the expected maximum of as many
        binomials as there are banks, approximated by normal variables (Blom 1958), and at least 1.

        With up to 64 banks it is less than in simulations by at most 29 % at less than 1 operation per bank,
        12 % at 2, 5 % at 8, 2 % at 32, and 1 % at 256.
        """
        mean = batch / self.banks
        if self.banks == 1:
            return float(batch)
        deviation = math.sqrt(mean * (1 - 1 / self.banks))
        greatest = NormalDist().inv_cdf((self.banks - 0.375) / (self.banks + 0.25))
        return min(float(batch), max(1.0, mean + greatest * deviation))
