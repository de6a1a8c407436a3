"""``<world>-resnet20``: a residual net of 20 layers that classifies images (He et al. 2016)."""

from __future__ import annotations

from typing import Final

from murmurate.recipes._resnet import SMALL_WORLDS, classifier
from murmurate.training.run import Run

ALGORITHM: Final = "resnet20"
WORLDS = SMALL_WORLDS


def recipe(name: str) -> Run:
    """See ``_resnet.classifier``."""
    return classifier(name, ALGORITHM)
