"""Invalid steps are refused, and do not change the replay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from murmurate.replay.frame_replay import FrameReplay
from murmurate.replay.interface import Chunk, Steps
from murmurate.replay.priorities import Prioritized
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import Column

SIMULATORS = 3
SHOWN = {"rows": Column((2,), torch.float32), "frames": Column((4, 2, 2), torch.uint8)}


def replay(kind: str) -> RowReplay | FrameReplay:
    sampler = Prioritized(90)
    if kind == "frames":
        return FrameReplay(sampler, (2, 2), simulators=SIMULATORS, steps=2)
    action = Column((), torch.int64)
    return RowReplay(sampler, SHOWN[kind], action, steps=2, simulators=SIMULATORS)


def steps(kind: str, seed: int = 0) -> Steps:
    shape, dtype = SHOWN[kind]
    make = torch.Generator().manual_seed(seed)
    shown = [torch.randint(256, (SIMULATORS, *shape), generator=make).to(dtype) for _ in range(2)]
    action = torch.randint(4, (SIMULATORS,), generator=make)
    reward = torch.randn(SIMULATORS, generator=make)
    never = torch.zeros(SIMULATORS, dtype=torch.bool)
    return Steps(shown[0], action, reward, shown[1], never, never.clone(), reward + 1, reward + 2)


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [part for key in sorted(state) for part in flat(state[key])]
    if isinstance(state, list | tuple):
        return [part for one in state for part in flat(one)]
    if isinstance(state, Chunk):
        state = state.values
    return [state.tolist() if torch.is_tensor(state) else state]


def odd(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.where(torch.arange(len(x)) == 1, value, x)


WRONG = {
    "observation": lambda s: s._replace(observation=s.observation.double()),
    "'observation'": lambda s: s._replace(observation=s.observation[:1]),
    "next_observation": lambda s: s._replace(next_observation=s.next_observation[:, 1:]),
    "action": lambda s: s._replace(action=s.action.float()),
    "terminated": lambda s: s._replace(terminated=s.terminated.long()),
    "truncated": lambda s: s._replace(truncated=s.truncated[:2]),
    "'reward' of simulator 1 is nan": lambda s: s._replace(reward=odd(s.reward, math.nan)),
    "'action_value' of simulator 1 is inf": lambda s: s._replace(action_value=odd(s.reward, math.inf)),
    "'next_value' is torch.float32 .2.": lambda s: s._replace(next_value=s.next_value[:2]),
}


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.parametrize("kind", SHOWN)
def test_a_step_that_does_not_fit_changes_nothing(kind: str, words: str) -> None:
    one, other = replay(kind), replay(kind)
    for seed in range(4):
        for each in (one, other):
            each.observe(0, steps(kind, seed))
        with pytest.raises(ValueError, match=words):
            one.observe(0, WRONG[words](steps(kind, seed + 100)))
    assert flat(one.state()) == flat(other.state())


@pytest.mark.parametrize("kind", SHOWN)
def test_simulators_that_there_are_not_are_named(kind: str) -> None:
    with pytest.raises(ValueError, match=r"simulators 1 to 3, but this replay was opened for 3"):
        replay(kind).observe(1, steps(kind))


@pytest.mark.parametrize(
    ("error", "words"),
    [([1.0, math.nan], "transition 1 is nan"), ([1.0, -math.inf], "1 is -inf"), ([1.0], "for 2 transitions")],
)
def test_a_wrong_error_overwrites_nothing(error: list[float], words: str) -> None:
    made = RowReplay(Prioritized(4), SHOWN["rows"], Column((), torch.int64))
    for seed in range(6):
        made.observe(0, Steps(*(x[:1] for x in steps("rows", seed)[:8])))
    before = flat(made.state())
    values = {name: made.rows.column(name)[:2].clone() + 1 for name in made.rows.columns}
    with pytest.raises(ValueError, match=words):
        made.insert(values, 2, torch.tensor(error))
    assert flat(made.state()) == before
