"""How many cycles a gradient step of the learner's pipeline takes, and which sizes of its units are fastest
on a device (Zhang 2022, sections 4.2.2.3 and 4.4.1.2). Nothing here needs Amaranth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from murmurate.errors import Refusal

LFE5U_85F_DSPS = 156  # its multipliers (MULT18X18D)


@dataclass(frozen=True)
class Unit:
    """A systolic array of R x C elements, each of which is one multiplier."""

    rows: int
    columns: int

    @property
    def dsps(self) -> int:
        return self.rows * self.columns


def product_cycles(unit: Unit, m: int, k: int, n: int) -> int:
    """Cycles of [m, k] @ [k, n] by ``TensorUnit``: each tile of the matrix is loaded row by row, then m rows
    pass through it."""
    tiles = math.ceil(k / unit.rows) * math.ceil(n / unit.columns)
    return tiles * (unit.rows + m + unit.rows + unit.columns - 1)


def outer_cycles(unit: Unit, m: int, k: int, n: int) -> int:
    """Cycles of [k, m] @ [m, n] by ``OuterUnit``: for each tile m pairs are added, then its rows leave."""
    tiles = math.ceil(k / unit.rows) * math.ceil(n / unit.columns)
    return tiles * (m + unit.rows + unit.columns - 1 + unit.rows)


def stages(layers: Sequence[int]) -> list[tuple[str, int, int]]:
    """(FW, BW or WA; K; N) of each stage with a tensor unit. A bias is an additional row of FW and WA."""
    shapes = list(pairwise(layers))
    return [
        *(("FW", k + 1, n) for k, n in shapes),
        *(("BW", n, k) for k, n in shapes[:0:-1]),
        *(("WA", k + 1, n) for k, n in shapes[::-1]),
    ]


@dataclass(frozen=True)
class LearnerModel:
    """DP pipelines of FW, LOSS, BW and WA (see ``learner``) with a unit for each of ``stages(layers)``.

    The weights of a tile are loaded once, for all samples of a sub-batch. A stage begins when the stage
    before has sent its first complete row. clock_provenance: whether ``clock_hz`` is ``measured-pnr`` (from
    place and route) or ``assumed``. The model leaves out the forward pass of the target net, and the link to
    the host.
    """

    layers: tuple[int, ...]
    units: tuple[Unit, ...]
    dp: int
    clock_hz: float
    clock_provenance: str = "assumed"

    def __post_init__(self) -> None:
        if len(self.units) != len(stages(self.layers)):
            raise Refusal(f"{len(self.units)} units for {len(stages(self.layers))} stages; give one each.")
        if self.dp < 1 or self.clock_hz <= 0:
            raise Refusal(f"dp is {self.dp} and clock_hz {self.clock_hz}; both must be positive.")
        if self.clock_provenance not in ("measured-pnr", "assumed"):
            raise Refusal(f"clock_provenance is '{self.clock_provenance}': use measured-pnr or assumed.")

    @property
    def dsps(self) -> int:
        return self.dp * sum(unit.dsps for unit in self.units)

    def stage_cycles(self, batch: int) -> list[int]:
        """The cycles of each stage by itself, for the sub-batch of one pipeline."""
        share = math.ceil(batch / self.dp)
        return [
            (outer_cycles if kind == "WA" else product_cycles)(unit, share, k, n)
            for (kind, k, n), unit in zip(stages(self.layers), self.units, strict=True)
        ]

    def gradient_step_cycles(self, batch: int) -> int:
        """Cycles of the slowest stage, of filling the pipeline, of the sum over pipelines, and of the weight
        update.

        Sum and update work on one weight per cycle in each layer, on all layers at once; the sum over DP
        pipelines is a tree of adders in front of the update, log2 DP stages deep.
        """
        # latencies: 1 of LOSS, and those of all units
        fill = 1 + sum(unit.rows + unit.columns - 1 for unit in self.units)
        weights = max((k + 1) * n for k, n in pairwise(self.layers))
        reduction = math.ceil(math.log2(self.dp))
        return max(self.stage_cycles(batch)) + fill + weights + 1 + reduction

    def gradient_step_seconds(self, batch: int) -> float:
        return self.gradient_step_cycles(batch) / self.clock_hz


def choose(
    layers: tuple[int, ...],
    batch: int,
    *,
    clock_hz: float,
    dsps: int = LFE5U_85F_DSPS,
    clock_provenance: str = "assumed",
) -> LearnerModel:
    """The fastest model with at most ``dsps`` multipliers: for each DP, the slowest stage gets a larger unit
    as long as it fits.

    Raises Refusal if ``dsps`` is less than one multiplier per stage.
    """
    shapes = stages(layers)
    if len(shapes) > dsps:
        raise Refusal(f"{len(shapes)} stages need {len(shapes)} multipliers at least, and there are {dsps}.")
    best: LearnerModel | None = None
    for dp in (1 << i for i in range(min(batch, dsps // len(shapes)).bit_length())):
        model = LearnerModel(layers, (Unit(1, 1),) * len(shapes), dp, clock_hz, clock_provenance)
        while True:
            if best is None or model.gradient_step_cycles(batch) < best.gradient_step_cycles(batch):
                best = model
            cycles = model.stage_cycles(batch)
            slowest = cycles.index(max(cycles))
            kind, k, n = shapes[slowest]
            available = dsps // dp - model.dsps // dp + model.units[slowest].dsps
            unit_cycles = outer_cycles if kind == "WA" else product_cycles
            share = math.ceil(batch / dp)
            faster = [
                unit
                for r, c in product(_tile_sizes(k), _tile_sizes(n))
                if (unit := Unit(r, c)).dsps <= available and unit_cycles(unit, share, k, n) < cycles[slowest]
            ]
            if not faster:
                break
            # the smallest of the faster units
            unit = min(faster, key=lambda u: (u.dsps, unit_cycles(u, share, k, n)))
            units = (*model.units[:slowest], unit, *model.units[slowest + 1 :])
            model = LearnerModel(layers, units, dp, clock_hz, clock_provenance)
    assert best is not None
    return best


def _tile_sizes(extent: int) -> list[int]:
    """For each number of tiles that ``extent`` may be cut into, the smallest size of a tile."""
    return sorted({math.ceil(extent / tiles) for tiles in range(1, extent + 1)})
