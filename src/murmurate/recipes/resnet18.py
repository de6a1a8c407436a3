"""``<world>-resnet18``: a residual net of 18 layers that classifies images (He et al. 2016)."""

from __future__ import annotations

from typing import Final

from murmurate.recipes._resnet import ALL_WORLDS, classifier
from murmurate.training.run import Run

ALGORITHM: Final = "resnet18"
WORLDS = ALL_WORLDS


def recipe(name: str) -> Run:
    """See ``_resnet.classifier``."""
    return classifier(name, ALGORITHM)
