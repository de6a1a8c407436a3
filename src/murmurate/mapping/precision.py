"""The precisions of a recipe's learner that a plan considers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from murmurate.nets.precision import faster_precision
from murmurate.training.run import Run

PRECISIONS = ("float32", "bfloat16")


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
