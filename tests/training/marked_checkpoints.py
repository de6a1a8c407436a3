"""Checkpoints whose every number is a mark, by which a mixture of two is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from murmurate.training import checkpoint


def staged(folder: Path, mark: int, replicas: int = 2) -> Path:
    """Stage one checkpoint whose every number is ``mark``."""
    staging = folder / f".staging-{mark}"
    for rank in range(replicas):
        checkpoint.write_part(staging, rank, {"x": torch.full((3,), mark), "env_steps": mark})
    return staging


def about(mark: int) -> dict[str, Any]:
    return {"env_steps": mark, "seconds": float(mark), "replicas": 2}


def mark_of(found: Path) -> int:
    """The one number of a checkpoint; fails if it is a mixture."""
    marks = {checkpoint.read_manifest(found)["env_steps"]}
    for rank in checkpoint.parts(found):
        state = checkpoint.read_part(found, rank)
        marks |= {state["env_steps"], *state["x"].tolist()}
    (mark,) = marks
    return int(mark)
