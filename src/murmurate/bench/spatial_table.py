"""Jin 2018, Tables 4.2 and 4.3: one convolution on 1, 2 and 4 processors, plain and dilated.

The paper has 32 images of 64 channels on V100 GPUs; here each part is a process with one core. After an
interruption, the same command continues: each row is kept in a file.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from murmurate.bench._cache import cached_value
from murmurate.bench._result import Log, median, ratios
from murmurate.bench._spatial_timing import Case, timed
from murmurate.native.cores import usable_cores
from murmurate.ranges import PositiveInt

NAME = "spatial-table"
SUMMARY = "Jin's Tables 4.2 and 4.3: sizes, parts and dilation of a convolution, time and memory; resumable"

# (dilation, size, parts): speedups of forward and backward pass, and share of memory (Tables 4.2, 4.3)
PAPER: dict[tuple[int, int, int], tuple[float, float, float]] = {
    (1, 128, 2): (1.7, 1.9, 0.52),
    (1, 128, 4): (2.1, 2.8, 0.27),
    (1, 256, 2): (1.9, 2.3, 0.51),
    (1, 256, 4): (3.2, 3.9, 0.26),
    (1, 512, 2): (2.2, 2.1, 0.50),
    (1, 512, 4): (4.2, 4.7, 0.25),
    (3, 128, 2): (1.5, 1.7, 0.57),
    (3, 128, 4): (1.6, 2.0, 0.31),
    (3, 256, 2): (1.8, 1.9, 0.54),
    (3, 256, 4): (2.9, 3.5, 0.28),
    (3, 512, 2): (1.9, 2.0, 0.52),
    (3, 512, 4): (3.5, 4.1, 0.26),
}
CLAIM = (
    "Jin 2018, section 4.4: speed-ups are roughly linear up to 4 GPUs on images from 256 x 256, and those of "
    "dilated convolutions from 512 x 512"
)
_LINEAR = 0.85  # a speed-up of at least this times the number of cores counts as roughly linear


@dataclass(frozen=True)
class TablePlan:
    """sizes: sides of the images. parts: numbers of parts. dilations: dilations of the convolution; every
    combination of size, parts and dilation is a row. batch: number of images (32 in the paper). where: the
    folder that keeps the rows.

    channels: number of channels of each convolution. rounds: number of rounds of timing.
    """

    sizes: tuple[PositiveInt, ...] = (128, 256, 512)
    parts: tuple[PositiveInt, ...] = (2, 4)
    dilations: tuple[PositiveInt, ...] = (1, 3)
    batch: PositiveInt = 4
    channels: PositiveInt = 64
    rounds: PositiveInt = 15
    where: str = "runs/spatial-table"


QUICK = TablePlan(sizes=(128, 256), batch=1, rounds=3, where="runs/spatial-table-quick")
FULL = TablePlan()


def measure(plan: TablePlan, log: Log) -> dict[str, Any]:
    """Time of forward and backward pass and memory of one part, with speed-ups over the whole on one core,
    beside the paper's. Times of more parts than cores say nothing about parallelism, and are marked."""
    cores = usable_cores()
    rows = []
    for dilation, size, parts in itertools.product(plan.dilations, plan.sizes, plan.parts):
        result = row(plan, dilation, size, parts)
        result["enough_cores"] = parts <= cores
        rows.append(result)
        log(
            f"dilation {dilation}, {size} x {size}, {parts} parts: "
            f"forward {result['forward_speedup']:.2f} x, backward {result['backward_speedup']:.2f} x, "
            f"memory {result['memory_share']:.3f}"
        )
    return {
        "paper": CLAIM,
        "cores": cores,
        "rows": rows,
        "verdict": verdict(rows),
        "figure": str(draw(plan, rows)),
    }


def row(plan: TablePlan, dilation: int, size: int, parts: int) -> dict[str, Any]:
    """A row of the table, which is measured once."""
    case = Case(size, (parts, 1), dilation, channels=plan.channels, batch=plan.batch)
    key = [asdict(case), plan.rounds]
    return dict(cached_value(Path(plan.where), "row", key, lambda: _measured(case, plan.rounds)))


def _measured(case: Case, rounds: int) -> dict[str, Any]:
    size, (parts, _), dilation = case.size, case.grid, case.dilation
    whole, split = timed(case, rounds)
    return {
        "size": size,
        "parts": parts,
        "dilation": dilation,
        "batch": case.batch,
        "whole_forward_ms": 1e3 * median(whole.forward),
        "whole_backward_ms": 1e3 * median(whole.backward),
        "whole_megabytes": whole.activation_bytes / 1e6,
        "forward_ms": 1e3 * median(split.forward),
        "backward_ms": 1e3 * median(split.backward),
        "megabytes": split.activation_bytes / 1e6,
        "forward_speedup": median(ratios(whole.forward, split.forward)),
        "backward_speedup": median(ratios(whole.backward, split.backward)),
        "cpu_speedup": median(ratios(whole.cpu, split.cpu)),
        "memory_share": split.activation_bytes / whole.activation_bytes,
        "paper": dict(
            zip(
                ("forward_speedup", "backward_speedup", "memory_share"),
                PAPER.get((dilation, size, parts), ()),
                strict=False,
            )
        ),
        "case": asdict(case),
    }


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether the paper's claim holds in the rows that this machine has cores for."""
    tested = [
        r
        for r in rows
        if r["enough_cores"] and r["parts"] > 1 and r["size"] >= (256 if r["dilation"] == 1 else 512)
    ]
    if not tested:
        return "not tested: no row of the claim's sizes has a core for each part here"
    slower = [r for r in tested if min(r["forward_speedup"], r["backward_speedup"]) < _LINEAR * r["parts"]]
    failing = ", ".join(
        f"{r['size']} x {r['size']} dilation {r['dilation']} on {r['parts']} parts" for r in slower
    )
    if not slower:
        return f"holds in all {len(tested)} rows with a core for each part (at least {_LINEAR:g} of linear)"
    return f"does not hold in {len(slower)} of {len(tested)} rows with a core for each part: {failing}"


def draw(plan: TablePlan, rows: list[dict[str, Any]]) -> Path:
    """Draw speed-ups against parts, a panel for each dilation, with the paper's as dashed lines."""
    figure = Figure(figsize=(4.5 * len(plan.dilations), 3.6), layout="constrained")
    panels = figure.subplots(1, len(plan.dilations), sharey=True, squeeze=False)
    for panel, dilation in zip(panels[0], plan.dilations, strict=True):
        for colour, size in enumerate(plan.sizes):
            chosen = [r for r in rows if (r["dilation"], r["size"]) == (dilation, size)]
            parts = [1, *(r["parts"] for r in chosen)]
            panel.plot(parts, [1, *(r["backward_speedup"] for r in chosen)], f"C{colour}o-", label=f"{size}")
            published = [(r["parts"], r["paper"]["backward_speedup"]) for r in chosen if r["paper"]]
            panel.plot([1, *(p for p, _ in published)], [1, *(s for _, s in published)], f"C{colour}--")
        panel.set_xlabel("parts")
        panel.set_title(f"dilation {dilation}")
    panels[0][0].set_ylabel("backward pass: times as fast as whole")
    panels[0][0].legend(title="image side in pixels (dashed: Jin 2018, GPUs)")
    path = Path(plan.where) / "speedup.svg"
    figure.savefig(path)
    return path
