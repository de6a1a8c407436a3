"""Fixtures of tests of ``murmurate.load``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_models import MakeModel

import murmurate


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Loads the model of a recipe that was trained for two updates; each is trained once."""
    made: dict[str, Path] = {}

    def model(recipe: str | None = None, **options: Any) -> murmurate.TrainedModel:
        key = repr((recipe, options))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model") / "run"
            murmurate.train(
                recipe, updates=2, launcher="inline", eval_episodes=1, quiet=True, out=made[key], **options
            )
        return murmurate.load(made[key])

    return model
