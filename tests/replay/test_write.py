"""What a replay writes into given columns is what it gathers, for every store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Steps
from murmurate.sources.service_control import batch_fields
from murmurate.spec import EnvSpec

ROWS = EnvSpec("rows", (3,), torch.float32, actions=0, action_shape=(2,))
IMAGES = EnvSpec("images", (4, 6, 5), torch.uint8, actions=3, stacked=True)
COLOURS = EnvSpec("colours", (6, 6, 5), torch.uint8, actions=3, stacked=True, channels=3)


def filled(spec: EnvSpec, behaviour: dict[str, tuple[int, ...]], steps: int) -> Any:
    config = ReplayConfig(capacity=120, learning_starts=0)
    replay = open_replay(config, spec, simulators=2, steps=steps, discount=0.9, seed=0, behaviour=behaviour)
    generator = torch.Generator().manual_seed(0)

    def seen() -> torch.Tensor:
        values = torch.randint(256, (2, *spec.observation_shape), generator=generator)
        return values.to(spec.observation_dtype)

    observation = seen()
    for step in range(50):
        action = torch.randint(3, (2,)) if spec.actions else torch.randn(2, 2, generator=generator)
        ends = torch.tensor([step % 7 == 6, step % 11 == 10])
        after = seen()
        outputs = {name: torch.randn(2, *shape, generator=generator) for name, shape in behaviour.items()}
        flags = (ends & (step % 2 == 0), ends & (step % 2 == 1))
        replay.observe(0, Steps(observation, action, torch.randn(2), after, *flags, behaviour=outputs))
        observation = after
    return replay


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("behaviour", [{}, {"probability": (), "memory": (4,)}])
@pytest.mark.parametrize("spec", [ROWS, IMAGES, COLOURS], ids=lambda spec: spec.name)
def test_written_is_gathered(spec: EnvSpec, behaviour: dict[str, tuple[int, ...]], steps: int) -> None:
    replay = filled(spec, behaviour, steps)
    selection = replay.choose(16, 0.4)
    columns = {
        name: torch.empty(16, *shape, dtype=kind)
        for name, (shape, kind) in batch_fields(spec, behaviour).items()
        if name not in ("keys", "weights", "errors")
    }
    replay.write(selection, columns)
    sample = replay.gather(selection)
    for name, column in columns.items():
        of, _, output = name.partition(".")
        expected = sample.behaviour[output] if output else getattr(sample, of)
        assert torch.equal(column, expected), name
