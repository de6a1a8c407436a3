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
    board."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text())
    return tuple(rows)


@dataclass(frozen=True)
class ReplayManagerModel:
    """A replay manager of ``banks`` trees, each with a pipeline of its own; each index belongs to a random
    bank.

    speed: speed grade of the device. mhz: an assumed clock; None: the clock of the committed table.
    """

    shape: TreeShape
    banks: int = 1
    device: str = "lfe5u-85f"
    speed: int = 6
    mhz: float | None = None

    @property
    def clock(self) -> tuple[float, Provenance]:
        """(Hz, how it is known): the clock of the best placement seed. Between two sizes of the table with
        the same fan-out and width, it is the lower clock of the two.

        Raises Refusal for a size outside the table.
        """
        if self.mhz is not None:
            return 1e6 * self.mhz, "assumed"
        rows = self._rows()
        measured_mhz = [row["mhz"] for row in rows if row["leaves"] == self.shape.leaves]
        if measured_mhz:
            return 1e6 * max(measured_mhz), "measured-pnr"
        below = [row for row in rows if row["leaves"] < self.shape.leaves]
        above = [row for row in rows if row["leaves"] > self.shape.leaves]
        if not below or not above:
            known = sorted({row["leaves"] for row in rows})
            raise Refusal(
                f"the table of place and route has no clock for {self.shape.leaves:,} leaves of fan-out "
                f"{self.shape.fan_out} and width {self.shape.width} on {self.device} (it has "
                f"{', '.join(f'{n:,}' for n in known) or 'none'}). Measure it: murmurate fpga pnr; or "
                "assume a clock."
            )
        neighbours = max(below, key=lambda row: row["leaves"]), min(above, key=lambda row: row["leaves"])
        return 1e6 * min(row["mhz"] for row in neighbours), "interpolated-pnr"

    def _rows(self) -> list[dict[str, Any]]:
        key = (self.shape.fan_out, self.shape.width, self.device, self.speed)
        names = ("fan_out", "width", "device", "speed")
        return [row for row in table() if tuple(row[name] for name in names) == key]

    def sample_seconds(self, batch: int) -> float:
        return (self._fullest(batch) + self.shape.sample_latency) / self.clock[0]

    def update_seconds(self, batch: int) -> float:
        return (self._fullest(batch) + self.shape.update_latency) / self.clock[0]

    def _fullest(self, batch: int) -> float:
        """Expected number of operations of the bank with most of them: the expected maximum of as many
        binomials as there are banks, approximated by normal variables (Blom 1958). It is 3 to 8 % less than
        in simulations with 2 to 16 operations per bank, and 1 % less with more."""
        mean = batch / self.banks
        if self.banks == 1:
            return float(batch)
        deviation = math.sqrt(mean * (1 - 1 / self.banks))
        greatest = NormalDist().inv_cdf((self.banks - 0.375) / (self.banks + 0.25))
        return min(float(batch), mean + greatest * deviation)
