"""Bookkeeping of rollouts against tables, a scalar oracle, and exact resumption."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.sources.rollouts import RolloutSource
from murmurate.sources.simulator_groups import open_groups
from murmurate.spec import Batch, Episode, Trajectory
from murmurate.worlds.atari import AtariWorld
from murmurate.worlds.gym import GymWorld
from scripted import Counter, Line, Roulette, ScriptedSimulators, Watcher

FIELDS = [
    "observation",
    "action",
    "reward",
    "terminated",
    "truncated",
    "first",
    "last_observation",
    "truncated_observation",
    "memory",
]


def groups_of(script: list[list[Line]], cuts: list[int]) -> list[ScriptedSimulators]:
    bounds = [0, *cuts, len(script)]
    return [ScriptedSimulators(script[a:b], first=a) for a, b in itertools.pairwise(bounds)]


def test_table() -> None:
    """Two simulators, two batches of three steps; every value was worked out by hand."""
    script: list[list[Line]] = [
        [(1, ""), (2, "terminated"), (3, ""), (4, ""), (5, "truncated"), (6, "")],
        [(0, "truncated"), (1, ""), (0, "truncated"), (2, ""), (0, ""), (7, "terminated")],
    ]
    rollouts = RolloutSource(groups_of(script, []), Counter(), steps=3, seed=0)
    batch = next(rollouts)
    data: Trajectory = batch.data
    assert batch.env_steps == 6
    assert data.observation[..., 0].tolist() == [[0, 1000], [1, 1002], [3, 1003]]
    assert data.first.tolist() == [[True, True], [False, True], [True, False]]
    assert data.reward.tolist() == [[1, 0], [2, 1], [3, 0]]
    assert data.terminated.tolist() == [[False, False], [True, False], [False, False]]
    assert data.truncated.tolist() == [[False, True], [False, False], [False, True]]
    assert data.last_observation[:, 0].tolist() == [4, 1005]
    assert data.truncated_observation is not None
    assert data.truncated_observation[:, 0].tolist() == [1001, 1004]
    # observation + steps since the episode began, modulo 100
    assert data.action.tolist() == [[0, 0], [2, 2], [3, 4]]
    assert data.memory is not None
    assert data.memory.tolist() == [[0], [0]]
    assert [(e.simulator, e.episode_return, e.length) for e in batch.episodes] == [
        (1, 0, 1),
        (0, 3, 2),
        (1, 1, 2),
    ]
    batch = next(rollouts)
    data = batch.data
    assert data.observation[..., 0].tolist() == [[4, 1005], [5, 1006], [7, 1007]]
    assert data.first.tolist() == [[False, True], [False, False], [True, False]]
    assert data.terminated.tolist() == [[False, False], [False, False], [False, True]]
    assert data.truncated.tolist() == [[False, False], [True, False], [False, False]]
    assert data.truncated_observation is not None
    assert data.truncated_observation[:, 0].tolist() == [6]
    assert data.memory is not None
    assert data.memory.tolist() == [[1], [2]]  # what was before step 0; `first` tells whom to forget
    assert [(e.simulator, e.episode_return, e.length) for e in batch.episodes] == [(0, 12, 3), (1, 9, 3)]


def oracle(script: list[Line], b: int, steps: int) -> dict[str, list[Any]]:
    """One simulator and the counting actor, a scalar at a time."""
    out: dict[str, list[Any]] = {k: [] for k in ("observation", "action", "first", "memory", "final", "game")}
    shown, memory, first = 0, 0, True
    total, length = 0.0, 0
    for t in range(steps):
        reward, end = script[t % len(script)]
        total, length = total + reward, length + 1
        out["game"].append((b, total, length) if end else None)
        if end:
            total, length = 0.0, 0
        out["memory"].append(memory)
        memory = 0 if first else memory
        out["observation"].append(1000 * b + shown)
        out["first"].append(first)
        out["action"].append((1000 * b + shown + memory) % 100)
        memory += 1
        shown += 1
        out["final"].append(1000 * b + shown if end == "truncated" else -1)
        shown += 1 if end else 0
        first = bool(end)
    out["observation"].append(1000 * b + shown)
    return out


@pytest.mark.parametrize("cuts", [[], [2], [1, 3]], ids=["one group", "two halves", "three groups"])
@pytest.mark.parametrize("seed", range(5))
def test_any_script_in_any_groups_equals_the_scalar_oracle(cuts: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    script: list[list[Line]] = [
        [
            (float(draw.integers(9)), str(draw.choice(["", "", "", "terminated", "truncated"])))
            for _ in range(17)
        ]
        for _ in range(5)
    ]
    steps, batches = 4, 6
    expected = [oracle(lines, b, steps * batches) for b, lines in enumerate(script)]
    groups = groups_of(script, cuts)
    rollouts = RolloutSource(groups, Counter(), steps, seed=seed)
    for k in range(batches):
        batch = next(rollouts)
        data = batch.data
        for b, lines in enumerate(script):
            now = slice(k * steps, (k + 1) * steps)
            lived = [lines[t % 17] for t in range(steps * batches)][now]
            assert data.observation[:, b, 0].tolist() == expected[b]["observation"][now]
            assert data.last_observation[b, 0] == expected[b]["observation"][(k + 1) * steps]
            assert data.action[:, b].tolist() == expected[b]["action"][now]
            assert data.first[:, b].tolist() == expected[b]["first"][now]
            assert data.memory[b, 0] == expected[b]["memory"][k * steps]
            assert data.reward[:, b].tolist() == [reward for reward, _ in lived]
            assert data.terminated[:, b].tolist() == [end == "terminated" for _, end in lived]
            assert data.truncated[:, b].tolist() == [end == "truncated" for _, end in lived]
        games = [expected[b]["game"][k * steps + t] for t in range(steps) for b in range(5)]
        assert [(e.simulator, e.episode_return, e.length) for e in batch.episodes] == [g for g in games if g]
        row_major = [
            expected[b]["final"][k * steps + t]
            for t in range(steps)
            for b in range(5)
            if expected[b]["final"][k * steps + t] >= 0
        ]
        cut = data.truncated_observation
        assert ([] if cut is None else cut[:, 0].tolist()) == row_major
    sent = [[a for group in groups for a in group.sent[t]] for t in range(steps * batches)]
    assert sent == [[expected[b]["action"][t] for b in range(5)] for t in range(steps * batches)]


def copied(data: Trajectory) -> dict[str, Tensor | None]:
    return {k: None if getattr(data, k) is None else getattr(data, k).clone() for k in FIELDS}


def same(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    return all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in ((a[k], b[k]) for k in FIELDS)
    )


def test_a_batch_stays_valid_until_the_one_after_next() -> None:
    script: list[list[Line]] = [[(1, ""), (2, "truncated"), (3, "terminated")], [(4, ""), (5, "")]]
    rollouts = RolloutSource(groups_of(script, [1]), Counter(), steps=5, seed=0)
    for _ in range(4):
        batch = next(rollouts)
        before = copied(batch.data)
        next(rollouts)
        assert same(before, copied(batch.data))


@pytest.mark.parametrize(
    ("world", "actions", "steps", "batches"),
    [(GymWorld("CartPole-v1", 30), 2, 10, 20), (AtariWorld("pong", max_frames_per_episode=120), 6, 8, 5)],
    ids=["cartpole", "pong"],
)
def test_double_buffering_plays_the_same_games(world, actions: int, steps: int, batches: int) -> None:
    if isinstance(world, AtariWorld):
        pytest.importorskip("ale_py")
    whole = RolloutSource(open_groups(world, 5, training=True), Watcher(actions), steps, seed=3)
    halves = RolloutSource(
        open_groups(world, 5, training=True, double_buffer=True), Watcher(actions), steps, seed=3
    )
    ended = 0
    for _ in range(batches):
        a, b = next(whole), next(halves)
        assert same(copied(a.data), copied(b.data))
        assert sorted(a.episodes, key=repr) == sorted(b.episodes, key=repr)
        ended += len(a.episodes)
    assert ended >= 5
    whole.close()
    halves.close()


def through_json(x):
    """A state as a checkpoint keeps it: tensors copied apart, all else through JSON text."""
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, dict):
        assert all(type(k) is str for k in x)
        return {k: through_json(v) for k, v in x.items()}
    if isinstance(x, list):
        return [through_json(v) for v in x]
    assert x is None or type(x) in (bool, int, float, str)
    return json.loads(json.dumps(x))


@pytest.mark.parametrize("double_buffer", [False, True])
def test_resuming_on_cartpole_is_bit_for_bit(double_buffer: bool) -> None:
    def fresh(seed: int) -> RolloutSource:
        groups = open_groups(GymWorld("CartPole-v1", 25), 4, training=True, double_buffer=double_buffer)
        return RolloutSource(groups, Roulette(2), steps=7, seed=seed)

    rollouts = fresh(1)
    for _ in range(31):
        next(rollouts)
    saved = through_json(rollouts.state())
    # Another seed, and steps of its own: all of it must be overwritten.
    resumed = fresh(2)
    next(resumed)
    resumed.load(saved)
    assert resumed.exact
    ended = 0
    for _ in range(72):
        a, b = next(rollouts), next(resumed)
        assert same(copied(a.data), copied(b.data))
        assert list(a.episodes) == list(b.episodes)
        ended += len(a.episodes)
    assert ended > 50


class Noisy(Roulette):
    """Also draws from torch's global generator, as Dropout does."""

    def act(self, observation: Tensor, *others: Any, **options: Any) -> Any:
        action = super().act(observation, *others, **options)
        return action._replace(action=(action.action + (torch.rand(len(observation)) < 0.5)) % 2)


@pytest.mark.parametrize("double_buffer", [False, True])
def test_a_rollout_that_a_stop_ended_goes_on_bit_for_bit(double_buffer: bool) -> None:
    def fresh() -> RolloutSource:
        groups = open_groups(GymWorld("CartPole-v1", 25), 4, training=True, double_buffer=double_buffer)
        return RolloutSource(groups, Noisy(2), steps=30, seed=1, pauses=True)

    def batches(source: RolloutSource, first: int, count: int) -> Iterator[Batch]:
        for number in range(first, first + count):
            torch.manual_seed(number)  # as the training loop does
            yield next(source)

    whole = [(copied(b.data), list(b.episodes)) for b in batches(fresh(), 0, 4)]
    stopped, episodes = fresh(), list[Episode]()
    next(batches(stopped, 0, 1))
    for steps in (13, 9):  # twice within one rollout
        asked = itertools.count()
        stopped.alive = lambda played, asked=asked, last=steps: next(asked) == last  # type: ignore[misc]
        (pause,) = batches(stopped, 1, 1)
        assert (pause.data, pause.env_steps) == (None, 4 * steps)
        episodes += pause.episodes
        saved = through_json(stopped.state())
        stopped = fresh()
        stopped.load(saved)
        assert stopped.exact
    (rest,) = batches(stopped, 1, 1)
    assert rest.env_steps == 4 * (30 - 13 - 9)
    found = [(copied(rest.data), episodes + list(rest.episodes))]
    found += [(copied(b.data), list(b.episodes)) for b in batches(stopped, 2, 2)]
    for (data, ended), (expected, expected_ended) in zip(found, whole[1:], strict=True):
        assert same(data, expected)
        assert ended == expected_ended


def test_a_stop_keeps_recurrent_memory_and_final_observations() -> None:
    script: list[list[Line]] = [[(1, ""), (2, "truncated"), (3, "")], [(4, "truncated"), (5, "")]]
    whole = RolloutSource(groups_of(script, [1]), Counter(), steps=9, seed=0)
    stopped = RolloutSource(groups_of(script, [1]), Counter(), steps=9, seed=0, pauses=True)
    next(whole)
    next(stopped)
    asked = itertools.count()
    stopped.alive = lambda played: next(asked) == 5
    pause = next(stopped)
    resumed = RolloutSource(groups_of(script, [1]), Counter(), steps=9, seed=5, pauses=True)
    resumed.load(through_json(stopped.state()))
    expected, rest = next(whole), next(resumed)
    assert same(copied(expected.data), copied(rest.data))
    assert [*pause.episodes, *rest.episodes] == list(expected.episodes)


def test_who_cannot_be_saved_loses_the_steps_and_who_shall_not_pause_does_not() -> None:
    script: list[list[Line]] = [[(1.0, "")] * 50] * 2
    groups = groups_of(script, [1])
    groups[1].savable = False
    source = RolloutSource(groups, Counter(), steps=3, seed=0, pauses=True)
    asked = itertools.count()
    source.alive = lambda played: next(asked) == 2
    assert next(source).env_steps == 4
    assert "begun" not in source.state()
    source = RolloutSource(groups_of(script, [1]), Counter(), steps=3, seed=0)
    source.alive = lambda played: True
    assert next(source).env_steps == 6


def test_resuming_on_another_kind_of_device_draws_from_what_was_saved() -> None:
    def actions(saved_generator: list[int]) -> Tensor:
        rollouts = RolloutSource(
            open_groups(GymWorld("CartPole-v1", 25), 4, training=True), Roulette(2), steps=50, seed=0
        )
        # a CUDA generator has 16 bytes, a seed and an offset; a CPU's has 5,056
        rollouts.load(rollouts.state() | {"generator": torch.tensor(saved_generator, dtype=torch.uint8)})
        return next(rollouts).data.action

    one, other = [1] + [0] * 15, [2] + [0] * 15
    assert torch.equal(actions(one), actions(one))
    assert not torch.equal(actions(one), actions(other))


def test_resuming_keeps_recurrent_memory_and_unfinished_games() -> None:
    script: list[list[Line]] = [[(1, "")] * 9 + [(2, "terminated")], [(3, "")] * 6 + [(4, "truncated")]]
    rollouts = RolloutSource(groups_of(script, [1]), Counter(), steps=4, seed=0)
    next(rollouts)
    resumed = RolloutSource(groups_of(script, [1]), Counter(), steps=4, seed=5)
    resumed.load(through_json(rollouts.state()))
    for _ in range(5):
        a, b = next(rollouts), next(resumed)
        assert same(copied(a.data), copied(b.data))
        assert list(a.episodes) == list(b.episodes)


def test_an_initial_memory_that_is_learned_brings_no_graph_into_the_data() -> None:
    """Copies of it into one tensor, as actors send them, would make the graph of that tensor ever longer."""
    learned = torch.nn.Parameter(torch.zeros(1))

    class Learning(Counter):
        def initial_memory(self, batch: int) -> Tensor:
            return learned.expand(batch, 1)

    rollouts = RolloutSource(groups_of([[(1, "")]], []), Learning(), steps=3, seed=0)
    memory = next(rollouts).data.memory
    assert memory.tolist() == [[0]]
    assert not memory.requires_grad


def test_what_cannot_be_saved_begins_new_games_on_new_seeds() -> None:
    script: list[list[Line]] = [[(1.0, "")] * 50] * 2
    groups = groups_of(script, [1])
    groups[1].savable = False
    rollouts = RolloutSource(groups, Counter(), steps=3, seed=0)
    next(rollouts)
    assert not rollouts.exact
    again = groups_of(script, [1])
    again[1].savable = False
    resumed = RolloutSource(again, Counter(), steps=3, seed=0)
    resumed.load(through_json(rollouts.state()))
    data = next(resumed).data
    assert data.observation[0, :, 0].tolist() == [3, 1000]
    assert data.first[0].tolist() == [False, True]
    assert data.memory.tolist() == [[3], [0]]
    assert again[0].seeds == []
    assert again[1].seeds != groups[1].seeds


def test_continuous_actions_fill_a_last_dimension() -> None:
    groups = open_groups(GymWorld("Pendulum-v1", 5), 3, training=True)
    data = next(RolloutSource(groups, Roulette(0, (1,)), steps=12, seed=0)).data
    assert data.action.shape == (12, 3, 1)
    assert data.action.dtype == torch.float32
    assert data.truncated.sum() == 6
    assert data.truncated_observation.shape == (6, 3)
    # Pendulum shows (cos, sin, speed): the angle moves on by speed / 20 up to the truncated step.
    before, after = data.observation[4], data.truncated_observation[:3]
    angle = torch.atan2(before[:, 1], before[:, 0]) + after[:, 2] * 0.05
    torch.testing.assert_close(torch.cos(angle), after[:, 0], rtol=0, atol=1e-5)


def test_refusals() -> None:
    with pytest.raises(Refusal, match="simulators is 1; a learner needs at least one for each half"):
        open_groups(GymWorld("CartPole-v1"), 1, training=True, double_buffer=True)
    with pytest.raises(Refusal, match="simulators is 0; a learner needs at least one"):
        open_groups(GymWorld("CartPole-v1"), 0, training=True)
    with pytest.raises(ValueError, match="at least one step"):
        RolloutSource(groups_of([[(0.0, "")]], []), Counter(), steps=0, seed=0)
    cart, pendulum = (GymWorld(i).open(1, training=True) for i in ("CartPole-v1", "Pendulum-v1"))
    with pytest.raises(ValueError, match="one world"):
        RolloutSource([cart, pendulum], Counter(), steps=1, seed=0)
    two = RolloutSource(groups_of([[(0.0, "")]] * 2, []), Counter(), steps=1, seed=0)
    three = RolloutSource(groups_of([[(0.0, "")]] * 3, []), Counter(), steps=1, seed=0)
    with pytest.raises(ValueError, match="of 3 simulators in 1 groups, these are 2"):
        two.load(three.state())
