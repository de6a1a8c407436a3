"""torch's DTensor, with which spatial convolution is compared, on layers drawn by ``_spatial_layers``."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from murmurate.bench import _roles
from murmurate.bench._result import Log
from murmurate.bench._spatial_layers import DrawnLayer, distance, drawn_convolution, error_in_parts
from murmurate.errors import RunFailed
from murmurate.fabric.interface import Fabric

_PROCESSES = 2
_TIMEOUT = timedelta(seconds=5)
_TOLERANCE = 1e-10
RIGHT, WRONG_OUTPUT, WRONG_GRADIENT, REFUSED, CRASHES = (
    "right",
    "wrong output",
    "wrong gradient",
    "refused",
    "crashes",
)


def compared(layers: int, log: Log) -> dict[str, dict[str, int]]:
    """Counts of verdicts on ``layers`` drawn convolutions, by ``murmurate.spatial`` and by DTensor. Of ours,
    "wrong output" counts wrong gradients, too."""
    errors = [error_in_parts(drawn_convolution(seed)) for seed in range(layers)]
    right = sum(error is not None and error <= _TOLERANCE for error in errors)
    return {
        "ours": {RIGHT: right, WRONG_OUTPUT: layers - right},
        "torch, image sharded": verdicts(range(layers), log),
        "torch, batch sharded": verdicts(range(layers), log, along_batch=True),
    }


def verdicts(seeds: Sequence[int], log: Log, along_batch: bool = False) -> dict[str, int]:
    """Counts of DTensor's verdicts on convolutions of images that are sharded over two gloo processes by rows
    or columns.

    along_batch: shard along the batch instead, which DTensor supports, as a check of this comparison itself.
    Each layer is drawn from its own seed. Wrong: the output or a gradient differs by more than 1e-10
    (relative, in float64), without an error. Refused: an error is raised. Crashes: a process dies, or waits
    for the other in vain; the processes are then started again with the next layer.
    """
    counts: Counter[str] = Counter()
    remaining = list(seeds)
    while remaining:
        with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
            try:
                answers = _roles.run_together(_PROCESSES, work, folder, remaining, along_batch)
                counts.update(answers[0])
                remaining = []
            except RunFailed as failure:
                # a process may also die after the other has written its last verdict
                finished = _written_verdicts(folder)[: len(remaining) - 1]
                log(f"DTensor: layer {remaining[len(finished)]} crashes: {str(failure)[-200:]}")
                counts.update([*finished, CRASHES])
                remaining = remaining[len(finished) + 1 :]
    return {name: counts[name] for name in (RIGHT, WRONG_OUTPUT, WRONG_GRADIENT, REFUSED, CRASHES)}


def work(fabric: Fabric, folder: str, seeds: Sequence[int], along_batch: bool) -> list[str]:
    """One process's verdicts, in the order of ``seeds``. Rank 0 also writes each to a file as soon as both
    processes have one, so that a crash loses none, and counts for the layer in which it happened."""
    from torch.distributed.device_mesh import init_device_mesh

    _roles.join_gloo(fabric, os.path.join(folder, "rendezvous"), _PROCESSES, _TIMEOUT)
    mesh = init_device_mesh("cpu", (_PROCESSES,))
    finished, results = fabric.channel("finished", torch.zeros(1)), []
    for seed in seeds:
        results.append(_verdict(drawn_convolution(seed), mesh, along_batch))
        if len(finished.gather(torch.zeros(1))) == _PROCESSES and fabric.rank == 0:
            _write_verdict(folder, results[-1])
    return results


def _verdict(drawn: DrawnLayer, mesh: Any, along_batch: bool) -> str:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dim = 0 if along_batch else 2 if drawn.grid[0] > 1 else 3
    # two images, so that the batch can be sharded, too
    image = torch.cat([drawn.image[:1], -drawn.image[:1]])
    tensors = [t.clone().requires_grad_() for t in (image, *drawn.parameters)]
    expected = drawn.layer(*tensors)
    direction = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((expected * direction).sum(), tensors)
    dtensors = [
        distribute_tensor(t.detach(), mesh, [Replicate() if i else Shard(dim)]).requires_grad_()
        for i, t in enumerate(tensors)
    ]
    try:
        output: Any = drawn.layer(*dtensors)
        full_output: Tensor = output.full_tensor()
        if not _equal(full_output, expected):
            return WRONG_OUTPUT
        actual: Any = torch.autograd.grad((full_output * direction).sum(), dtensors, allow_unused=True)
        if any(g is None for g in actual):
            return WRONG_GRADIENT
        equal = [_equal(a.full_tensor(), g) for a, g in zip(actual, gradients, strict=True)]
    except Exception as error:  # whatever it raises, it did not give a wrong result
        if any(word in str(error).lower() for word in ("timed out", "timeout", "connection")):
            raise  # one process is still waiting for the other: the process group is of no more use
        return REFUSED
    return RIGHT if all(equal) else WRONG_GRADIENT


def _equal(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and distance(actual, expected) <= _TOLERANCE


def _write_verdict(folder: str, verdict: str) -> None:
    with Path(folder, "verdicts").open("a") as file:
        file.write(f"{verdict}\n")


def _written_verdicts(folder: str) -> list[str]:
    file = Path(folder, "verdicts")
    return file.read_text().splitlines() if file.exists() else []
