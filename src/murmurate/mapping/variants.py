"""The variants of a recipe whose primitives cost something else: other precisions, other devices or threads,
and images of a replay that are stored elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from murmurate.nets.precision import faster_precision
from murmurate.spec import Placement
from murmurate.training.run import Run

PRECISIONS = ("float32", "bfloat16")
_MOST_THREADS = 8  # more hardly ever pay for nets of the sizes that agents have


def in_precision(run: Run, precision: str) -> Run | None:
    """``run`` with its learner in ``precision``; None for a learner without a choice, or that leaves it to
    the device (``auto``)."""
    learner: Any = run.learner
    is_own_net = bool(getattr(learner, "network", ""))  # it computes in float32
    if is_own_net or getattr(learner, "precision", None) not in PRECISIONS:
        return None
    return dataclasses.replace(run, learner=dataclasses.replace(learner, precision=precision))


def with_faster_precision(run: Run) -> list[Run]:
    """``run``, and it in the precision in which its first device multiplies matrices faster, if that is
    another one and its learner has the choice."""
    found = in_precision(run, faster_precision(torch.device(run.placement.devices[0])))
    return [run] if found in (None, run) else [run, found]


def variants_here(run: Run, cores: int) -> list[Run]:
    """The variants whose costs are measured on this machine; ``run`` is the first. Each placement is measured
    in the precision of ``run``, and in the one that its device is faster in."""
    placed = _placed(run, cores, torch.cuda.device_count())
    return [each for one in placed for each in with_faster_precision(one)]


def variants(run: Run, cores: int, gpus: int) -> list[Run]:
    """All variants of which a profile of a host with so many cores and GPUs may hold costs; ``run`` is the
    first."""
    placed = _placed(run, cores, gpus)
    found = [*placed, *(in_precision(one, precision) for one in placed for precision in PRECISIONS)]
    return _distinct(each for each in found if each is not None)


def _placed(run: Run, cores: int, gpus: int) -> list[Run]:
    """``run``, and it on the CPU with one thread and with several, and on all GPUs with the images of its
    replay in host memory and on the GPU."""
    found = [run, *(placed_on_cpu(run, threads) for threads in (1, min(cores, _MOST_THREADS)))]
    on_gpus = Placement(tuple(f"cuda:{i}" for i in range(gpus)))
    if gpus and run.placement.devices != ("cuda",):  # which is the first one
        placed = dataclasses.replace(run, placement=on_gpus)
        found += [_with_images(placed, place) for place in ("host", "device")]
    return _distinct(found)


def placed_on_cpu(run: Run, threads: int = 1) -> Run:
    """``run`` with its learners, and the images of its replay, on the CPU."""
    return _with_images(dataclasses.replace(run, placement=Placement(threads=threads)), "host")


def _with_images(run: Run, place: str) -> Run:
    """``run`` with the images of its replay in ``place``, if it has a replay of stacked images in memory."""
    source: Any = run.source
    replay = getattr(source, "replay", None)
    if replay is None or replay.folder or not run.world.spec().stacked:
        return run
    return dataclasses.replace(
        run, source=dataclasses.replace(source, replay=dataclasses.replace(replay, images=place))
    )


def _distinct(runs: Iterable[Run]) -> list[Run]:
    """``runs`` without repetitions; they have no hashes."""
    found: list[Run] = []
    for run in runs:
        if run not in found:
            found.append(run)
    return found
