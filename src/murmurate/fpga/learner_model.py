"""How many cycles a gradient step of the learner's pipeline takes, and which sizes of its units are fastest
on a device (Zhang 2022, sections 4.2.2.3 and 4.4.1.2). Nothing here needs Amaranth."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple, TypeVar

from murmurate.errors import Refusal
from murmurate.fpga.fixed_point import OPERAND_BITS
from murmurate.fpga.learner import MASTER_BITS, FixedPointFormats

Item = TypeVar("Item")
LFE5U_85F_DSPS = 156  # multipliers (MULT18X18D) of an LFE5U-85F
LFE5U_85F_BLOCK_RAMS = 208  # block RAMs (DP16KD) of an LFE5U-85F
BLOCK_RAM_BITS = 18 * 1_024
# cycles of LearnerPipeline
_PASS_ON = 4  # a result of FW or BW is narrowed, written, read by the next stage, and registered
_BEGIN = 3  # a step begins with the first sample, which is read when FW's first tile has been loaded
_LOSS = 4  # outputs are read, compared with the target, and become errors, which are written and read
_UPDATE = 3  # a gradient is read and chosen from its row, and the weight is updated


@dataclass(frozen=True)
class Unit:
    """A systolic array of R x C elements, each of which is one multiplier. Raises Refusal for sizes below
    1."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1:
            raise Refusal(f"a unit of {self.rows} x {self.columns} elements; use at least 1 x 1.")

    @property
    def dsps(self) -> int:
        return self.rows * self.columns


def product_cycles(unit: Unit, m: int, k: int, n: int) -> int:
    """Cycles of [m, k] @ [k, n] by ``TensorUnit``: each tile of the matrix is loaded row by row, then m rows
    pass through it."""
    tiles = math.ceil(k / unit.rows) * math.ceil(n / unit.columns)
    return tiles * (unit.rows + m + unit.rows + unit.columns - 1)


def first_row_cycles(unit: Unit, m: int, k: int, n: int) -> int:
    """Cycles of ``product_cycles`` from its first row of input to its first complete row of output, which
    leaves in the last tile; the first tile has been loaded before."""
    return product_cycles(unit, m, k, n) - unit.rows - m


def outer_cycles(unit: Unit, m: int, k: int, n: int) -> int:
    """Cycles of [k, m] @ [m, n] by ``OuterUnit``: for each tile m pairs are added, then its rows leave."""
    tiles = math.ceil(k / unit.rows) * math.ceil(n / unit.columns)
    return tiles * (m + unit.rows + unit.columns - 1 + unit.rows)


def stages(layers: Sequence[int]) -> list[tuple[str, int, int]]:
    """(FW, BW or WA; K; N) of each stage with a tensor unit. A bias is an additional row of FW and WA.
    Raises Refusal for fewer than two layers, and for a width below 1."""
    if len(layers) < 2 or min(layers) < 1:
        raise Refusal(f"layers is {tuple(layers)}; give the widths of at least two, such as (4, 8, 8, 2).")
    shapes = list(pairwise(layers))
    return [
        *(("FW", k + 1, n) for k, n in shapes),
        *(("BW", n, k) for k, n in shapes[:0:-1]),
        *(("WA", k + 1, n) for k, n in shapes[::-1]),
    ]


def memory_bits(layers: Sequence[int], batch: int, pipelines: int = 1) -> int:
    """Bits of the memories of a ``LearnerPipeline``, but for the queues of its units' partial sums.

    In all: the master weights, and activations, outputs, errors and targets of the batch. In each
    pipeline: the sums of gradients, and the weights, which a layer with BW has twice. Raises Refusal as
    ``stages``."""
    accumulator, in_all, each = FixedPointFormats().accumulator_bits, 0, 0
    for kind, k, n in stages(layers):
        if kind == "FW":
            in_all += k * n * MASTER_BITS + batch * (k - 1 + n) * OPERAND_BITS
            each += k * n * (accumulator + OPERAND_BITS)
        elif kind == "BW":
            each += k * n * OPERAND_BITS
    labels = OPERAND_BITS + max(1, (layers[-1] - 1).bit_length())
    return in_all + batch * (layers[-1] * OPERAND_BITS + labels) + pipelines * each


@dataclass(frozen=True)
class LearnerModel:
    """DP pipelines of FW, LOSS, BW and WA (see ``learner``) with a unit for each of ``stages(layers)``.

    A tile of weights is loaded once for all samples of a sub-batch, the first tile of a stage while the
    stage waits. A stage begins when the stage before has sent its first complete row; WA of a layer
    begins with BW of that layer. The cycles are those of ``LearnerPipeline`` in simulation.
    clock_provenance: whether ``clock_hz`` is ``measured-pnr`` (from place and route) or ``assumed``.

    The model leaves out the forward pass of the target net and the link to the host.

    Raises Refusal unless there is a unit for each stage, and for values out of range.
    """

    layers: tuple[int, ...]
    units: tuple[Unit, ...]
    dp: int
    clock_hz: float
    clock_provenance: str = "assumed"

    def __post_init__(self) -> None:
        if len(self.units) != len(stages(self.layers)):
            raise Refusal(f"{len(self.units)} units for {len(stages(self.layers))} stages; give one each.")
        if self.dp < 1 or not self.clock_hz > 0:
            raise Refusal(f"dp is {self.dp} and clock_hz {self.clock_hz}; both must be positive.")
        if self.clock_provenance not in ("measured-pnr", "assumed"):
            raise Refusal(f"clock_provenance is '{self.clock_provenance}': use measured-pnr or assumed.")

    @property
    def dsps(self) -> int:
        return self.dp * sum(unit.dsps for unit in self.units)

    def gradient_step_cycles(self, batch: int) -> int:
        """Cycles from the first offer of a sample to the last new weight: of loading FW's first tile, of FW,
        LOSS, BW and WA up to the last row of a gradient, of the sum over pipelines, and of the weight update.

        Sum and update work on one weight per cycle in each layer, on all layers at once; the sum over DP
        pipelines is a tree of adders in front of the update, log2 DP stages deep.
        """
        share, shapes = math.ceil(batch / self.dp), stages(self.layers)
        own = [_own_cycles(*shape, unit, share) for shape, unit in zip(shapes, self.units, strict=True)]
        forward, backward, gradient = by_kind(own)
        errors = _BEGIN + self.units[0].rows + sum(forward) + _LOSS  # a layer's first errors arrive
        end = errors + gradient[0]
        for layer_backward, layer_gradient in zip(backward, gradient[1:], strict=True):
            errors += layer_backward
            end = max(end, errors + layer_gradient)
        weights = max((k + 1) * n for k, n in pairwise(self.layers))
        return end + weights + _UPDATE + math.ceil(math.log2(self.dp))

    def gradient_step_seconds(self, batch: int) -> float:
        return self.gradient_step_cycles(batch) / self.clock_hz


class _UnitSizes(NamedTuple):
    """Units of some stages, each with the number of its stage, and the cycles that these stages take."""

    dsps: int
    cycles: int
    units: tuple[tuple[int, Unit], ...]


def choose(
    layers: tuple[int, ...], batch: int, *, clock_hz: float, dsps: int = LFE5U_85F_DSPS
) -> LearnerModel:
    """The model with the fewest cycles and at most ``dsps`` multipliers, of all whose DP is a power of two.

    Raises Refusal if ``dsps`` is less than one multiplier per stage, for a batch below 1, and as ``stages``.
    """
    shapes = stages(layers)
    if batch < 1:
        raise Refusal(f"a batch of {batch}; use at least 1.")
    if len(shapes) > dsps:
        raise Refusal(f"{len(shapes)} stages need {len(shapes)} multipliers at least, and there are {dsps}.")
    models = []
    for dp in (1 << i for i in range(min(batch, dsps // len(shapes)).bit_length())):
        most, share = dsps // dp, math.ceil(batch / dp)
        sizes = [
            _fastest(
                (
                    # FW's first tile cannot be loaded while it waits
                    _UnitSizes(
                        r * c, _own_cycles(kind, k, n, unit, share) + r * (stage == 0), ((stage, unit),)
                    )
                    for r, c in product(_tile_sizes(k), _tile_sizes(n))
                    if (unit := Unit(r, c))
                ),
                most,
            )
            for stage, (kind, k, n) in enumerate(shapes)
        ]
        forward, backward, gradient = by_kind(sizes)
        path = gradient[-1]
        for layer_backward, layer_gradient in zip(backward[::-1], gradient[-2::-1], strict=True):
            path = _joined(layer_gradient, _joined(layer_backward, path, operator.add, most), max, most)
        for layer_forward in forward:
            path = _joined(layer_forward, path, operator.add, most)
        units = tuple(unit for _, unit in sorted(path[-1].units))
        models.append(LearnerModel(layers, units, dp, clock_hz))
    return min(models, key=lambda model: model.gradient_step_cycles(batch))


def by_kind(of_stages: list[Item]) -> tuple[list[Item], list[Item], list[Item]]:
    """``of_stages``, which has an item for each of ``stages``, by FW, BW and WA."""
    layers = (len(of_stages) + 1) // 3
    return of_stages[:layers], of_stages[layers : 2 * layers - 1], of_stages[2 * layers - 1 :]


def _own_cycles(kind: str, k: int, n: int, unit: Unit, share: int) -> int:
    """Cycles from a stage's first row of input to that of the next stage, or for WA to its last output."""
    return outer_cycles(unit, share, k, n) if kind == "WA" else first_row_cycles(unit, share, k, n) + _PASS_ON


def _joined(
    one: list[_UnitSizes], other: list[_UnitSizes], cycles: Callable[[int, int], int], most: int
) -> list[_UnitSizes]:
    """The fastest sizes of the stages of both, whose cycles together are ``cycles`` of those of each."""
    pairs = product(one, other)
    return _fastest(
        (_UnitSizes(a.dsps + b.dsps, cycles(a.cycles, b.cycles), a.units + b.units) for a, b in pairs), most
    )


def _fastest(found: Iterable[_UnitSizes], most: int) -> list[_UnitSizes]:
    """Those with at most ``most`` multipliers and fewer cycles than any with as few multipliers, from the
    slowest to the fastest."""
    kept: list[_UnitSizes] = []
    for sizes in sorted(found, key=lambda sizes: sizes[:2]):
        if sizes.dsps <= most and (not kept or sizes.cycles < kept[-1].cycles):
            kept.append(sizes)
    return kept


def _tile_sizes(extent: int) -> list[int]:
    """For each number of tiles that ``extent`` may be cut into, the smallest size of a tile."""
    return sorted({math.ceil(extent / tiles) for tiles in range(1, extent + 1)})
