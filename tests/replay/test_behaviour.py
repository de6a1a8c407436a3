"""Tensors recorded with the actions are returned with the transitions, by every replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replay.config import ReplayConfig, open_replay, replay_bytes
from murmurate.replay.interface import Steps
from murmurate.sources.shared_ring import ActorRing, ActorStep
from murmurate.spec import EnvSpec

SHAPES = {"log_probability": (), "memory": (3,)}
SPECS = {
    "rows": EnvSpec("rows", (2,), torch.float32, actions=3),
    "images": EnvSpec("images", (2, 4, 4), torch.uint8, actions=3, stacked=True),
}
CONFIG = ReplayConfig(capacity=64, learning_starts=0)


def opened(kind: str, steps: int, behaviour: Any = SHAPES) -> Any:
    return open_replay(
        CONFIG, SPECS[kind], simulators=2, steps=steps, discount=0.9, seed=0, behaviour=behaviour
    )


def step(kind: str, number: int) -> Steps:
    """Step ``number`` of two simulators: what is recorded says which it was."""
    shape, dtype = (2, *SPECS[kind].observation_shape), SPECS[kind].observation_dtype
    no = torch.zeros(2, dtype=torch.bool)
    which = torch.tensor([number, 100 + number])
    seen = which.view(2, *[1] * (len(shape) - 1)).expand(shape).to(dtype)
    recorded = {"log_probability": -which.float(), "memory": which.float()[:, None] + torch.arange(3) / 10}
    return Steps(seen, which % 3, which.float(), seen + 1, no, no, behaviour=recorded)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", SPECS)
def test_it_is_that_of_the_first_step_of_each_transition(kind: str, steps: int) -> None:
    replay = opened(kind, steps)
    for number in range(20):
        replay.observe(0, step(kind, number))
    again = opened(kind, steps)
    again.load(replay.state())
    for made in (replay, again):
        sample = made.sample(32, 0.4)
        newest = sample.observation.flatten(1)[:, -1].float()
        torch.testing.assert_close(sample.behaviour["log_probability"], -newest)
        expected = newest[:, None] + torch.arange(3) / 10
        torch.testing.assert_close(sample.behaviour["memory"], expected)
    for name, kept in (("the one", replay), ("the loaded one", again)):
        kept.observe(0, step(kind, 20))
        assert len(kept) == 2 * (22 - steps), name


@pytest.mark.parametrize("kind", SPECS)
def test_a_step_without_it_is_refused_and_none_is_kept_where_none_is_asked_for(kind: str) -> None:
    with pytest.raises(ValueError, match="no 'log_probability'"):
        opened(kind, 1).observe(0, step(kind, 0)._replace(behaviour={}))
    plain = opened(kind, 1, behaviour=None)
    for number in range(4):
        plain.observe(0, step(kind, number))
    assert plain.sample(4, 0.4).behaviour == {}


def test_it_takes_the_memory_that_is_said_beforehand() -> None:
    one, other = (
        replay_bytes(CONFIG, SPECS["rows"], simulators=2, steps=1, batch=4, behaviour=behaviour)
        for behaviour in (None, SHAPES)
    )
    assert other - one == CONFIG.capacity * 4 * (1 + 3)


def test_it_passes_from_an_actor_to_its_learner() -> None:
    memory = SharedMemoryFile.create()
    ring = ActorRing(memory, SPECS["rows"], 2, SHAPES)
    reader = ActorRing(SharedMemoryFile(memory.descriptor), SPECS["rows"], 2, SHAPES)
    ring.put(ActorStep(step("rows", 7), [], version=1))
    result = reader.oldest().steps
    torch.testing.assert_close(result.behaviour["log_probability"], torch.tensor([-7.0, -107.0]))
    assert result.behaviour["memory"].shape == (2, 3)
    assert result.action_value is None
    reader.drop()
    memory.close()
