"""Fixtures of this folder."""

from __future__ import annotations

import pytest

from bench.gala_trainer import Trainer
from murmurate.bench import _resumable


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(_resumable, "murmurate", trainer)
    monkeypatch.setattr(_resumable, "measured_speed", trainer.speed)
    return trainer
