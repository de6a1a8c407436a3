"""Tensors recorded with the actions are returned with the transitions, by every replay."""

from __future__ import annotations

import dataclasses
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
    for name, kept in (("the one", replay), ("the loaded one", again)):
        check(kept, steps, set(range(21 - steps)), name)
        kept.observe(0, step(kind, 20))  # completes what had begun before
        assert len(kept) == 2 * (22 - steps), name
        check(kept, steps, set(range(22 - steps)), name)


def check(replay: Any, steps: int, first: set[int], name: str) -> None:
    """Transitions begin at all of ``first``, and hold what belongs to them."""
    found = set()
    for _ in range(20):
        sample = replay.sample(32, 0.4)
        newest = sample.observation.flatten(1)[:, -1].float()
        found |= set(newest.tolist())
        assert torch.equal(sample.action, newest.long() % 3), name
        expected = sum(0.9**k * (newest + k) for k in range(steps))
        torch.testing.assert_close(sample.reward, expected, msg=name)
        torch.testing.assert_close(sample.behaviour["log_probability"], -newest, msg=name)
        expected = newest[:, None] + torch.arange(3) / 10
        torch.testing.assert_close(sample.behaviour["memory"], expected, msg=name)
    assert found == {float(k) for k in (*first, *(100 + k for k in first))}, name


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("rows", {}),
        ("rows", {"alpha": 0.0}),
        ("rows", {"segments": 2}),
        ("rows", {"segments": 2, "segment_draws": "one"}),
        ("rows", {"manager": "fpga"}),
        ("images", {}),
    ],
)
def test_torchs_default_device_and_dtype_do_not_matter(kind: str, changes: dict[str, Any]) -> None:
    played, errors = [step(kind, number) for number in range(20)], torch.linspace(0, 3, 16)
    config = dataclasses.replace(CONFIG, **changes)
    more: Any = {"simulators": 2, "steps": 2, "discount": 0.9, "seed": 0, "behaviour": SHAPES}

    def drawn() -> Any:
        replay, again = (open_replay(config, SPECS[kind], **more) for _ in range(2))
        for steps in played:
            replay.observe(0, steps)
        again.load(replay.state())
        again.update(again.sample(16, 0.4).keys, errors)
        return again.sample(16, 0.4)

    expected = drawn()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            result = drawn()
    finally:
        torch.set_default_dtype(default)
    for name in ("keys", "weights", "observation", "next_observation", "action", "reward", "discount"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=0, atol=0)
    for name in SHAPES:
        assert torch.equal(result.behaviour[name], expected.behaviour[name])


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
