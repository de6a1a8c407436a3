"""Batches from a replay: how often each transition is drawn, its contents, and exact resumption."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Sample, Steps
from murmurate.replay.rows import RowStore
from murmurate.sources import replay_sampler
from murmurate.sources.replay_sampler import ReplaySampler
from murmurate.sources.replay_source import ReplaySource
from murmurate.spec import EnvSpec
from murmurate.worlds.registry import world as world_called
from scripted import Counter, ScriptedSimulators
from short_runs import altered, preflight

SCRIPT = [
    [(1.0, ""), (2.0, "terminated"), (3.0, "")],
    [(0.0, "truncated"), (1.0, ""), (4.0, ""), (2.0, "terminated"), (5.0, "")],
]
CONFIG = ReplayConfig(capacity=400, learning_starts=20, samples_per_insert=4.0)


def source(
    config: ReplayConfig = CONFIG, batch: int = 8, groups=None, seed: int = 0, progress=lambda: 0.5
) -> ReplaySource:
    groups = [ScriptedSimulators(SCRIPT)] if groups is None else groups
    spec: EnvSpec = groups[0].spec
    size = sum(group.size for group in groups)
    replay = open_replay(config, spec, simulators=size, steps=1, discount=0.9, seed=seed)
    drawing = ReplaySampler(replay, config, batch, torch.device("cpu"), progress)
    return ReplaySource(groups, Counter(), drawing, seed=seed)


@pytest.mark.parametrize("samples_per_insert", [0.5, 4.0, 32.0])
def test_each_transition_is_drawn_as_often_as_is_asked_for(samples_per_insert: float) -> None:
    made = source(dataclasses.replace(CONFIG, samples_per_insert=samples_per_insert))
    played = drawn = 0
    for number, batch in zip(range(200), made, strict=False):
        assert len(batch.data.keys) == 8
        played += batch.env_steps
        drawn += 8
        assert drawn <= samples_per_insert * (played - 20)
        if number:  # never more than a turn behind
            assert drawn > samples_per_insert * (played - 20 - 2 * 2) - 8
    assert made.fields()["samples_per_insert"] == pytest.approx(drawn / (played - 20))
    assert made.fields()["beta"] == pytest.approx(0.7)


def drawing_from(config: ReplayConfig, random_env_steps: int) -> ReplaySampler:
    replay = open_replay(config, ScriptedSimulators(SCRIPT).spec, simulators=2, steps=1, discount=0.9, seed=0)
    return ReplaySampler(
        replay, config, 8, torch.device("cpu"), lambda: 0.0, random_env_steps=random_env_steps
    )


def test_an_empty_replay_in_the_middle_of_a_run_is_drawn_from_at_once_and_without_random_steps() -> None:
    config = dataclasses.replace(CONFIG, samples_per_insert=4.0, learning_starts=20)
    sampler = drawing_from(config, random_env_steps=100)
    sampler.fresh_start(7)
    assert sampler.played == 100, "random steps at a run's start are over"
    assert sampler._drawn_transitions == 4 * 80, "nothing is left to draw of steps that it does not have"
    sampler.fresh_start(0)
    assert (sampler.played, sampler._drawn_transitions) == (0, 0), "the run has not begun to learn"


def test_one_that_begins_anew_in_a_fit_ends_it_with_its_peers() -> None:
    config = dataclasses.replace(CONFIG, samples_per_insert=4.0, learning_starts=0, fit_every=20, capacity=60)
    sampler = drawing_from(config, random_env_steps=0)
    sampler.fresh_start(33)  # a fit has 20 * 4 / 8 = 10 batches
    assert sampler._drawn_transitions == 3 * 8


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_is_not_overwritten_before_the_gpu_has_read_it(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that is late, and reads a batch only when it is waited for."""
    to_read: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Stream:
        def record_event(self) -> Stream:
            return self

        def synchronize(self) -> None:
            for copy, batch in to_read:
                copy.copy_(batch)
            to_read.clear()

    def on_device(sample: Sample, device: torch.device) -> Sample:
        copy = torch.empty_like(sample.reward)
        to_read.append((copy, sample.reward))
        return dataclasses.replace(sample, reward=copy)

    buffers = RowStore.buffers
    monkeypatch.setattr(RowStore, "buffers", lambda self, count, pinned: buffers(self, count))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(replay_sampler, "on_device", on_device)
    config = dataclasses.replace(CONFIG, alpha=0.0, ahead=ahead)
    spec = ScriptedSimulators(SCRIPT).spec
    replay = open_replay(config, spec, simulators=100, steps=1, discount=0.9, seed=0)
    seen, ended = torch.zeros(100, 1), torch.zeros(100, dtype=torch.bool)
    sampler = ReplaySampler(replay, config, 8, torch.device("cuda"), lambda: 0.0)
    sampler.insert(0, Steps(seen, ended.long(), torch.arange(100.0), seen, ended, ended))
    batches = [sampler.next(0, []).data for _ in range(4)]
    Stream().synchronize()
    for batch in batches:
        assert torch.equal(batch.reward, batch.keys.float())


def test_weights_are_over_the_greatest_of_the_batch() -> None:
    """One transition of nearly no error, which is hardly ever drawn, must not shrink all others."""
    made = source(dataclasses.replace(CONFIG, capacity=4000, beta=0.5, beta_end=0.5))
    smallest, spread = [], 0
    for _, batch in zip(range(200), made, strict=False):
        weights = batch.data.weights
        assert weights.max() == 1.0
        smallest.append(weights.min().item())
        spread += len(weights.unique()) > 1
        errors = 1.0 + 2.0 * (batch.keys % 2)
        batch.feedback(torch.where(batch.keys == 0, 1e-9, errors))
    replay = made.sampler.replay
    assert replay.sampler.mass[1] < 1e-3, "the one is still there"
    # a third of the error, to the power of alpha times beta: what is left of the weights without that one
    assert min(smallest[100:]) == pytest.approx(3**-0.3, rel=1e-3)
    assert spread > 100


def test_a_fit_follows_what_was_played_in_a_row() -> None:
    """Fitted Q-iteration: 40 steps, then the 20 batches of 8 that they allow at 4 draws each, and again."""
    made = source(dataclasses.replace(CONFIG, fit_every=40))
    result = [batch.env_steps for _, batch in zip(range(100), made, strict=False)]
    played = [steps for steps in result if steps]
    assert [number for number, steps in enumerate(result) if steps] == [0, 20, 40, 60, 80]
    assert played[0] == 60  # of which 20 came before learning starts
    assert played[1:] == [40, 40, 40, 40]


def test_a_fit_has_all_its_batches_where_floats_would_round_their_number_down() -> None:
    assert 50 * 4.64 < 232  # = 29 * 8
    config = dataclasses.replace(CONFIG, fit_every=50, samples_per_insert=4.64)
    result = [batch.env_steps for _, batch in zip(range(100), source(config), strict=False)]
    assert [number for number, steps in enumerate(result) if steps] == [0, 29, 58, 87]
    assert config.planned_updates(20 + 50, 8) == 29


def test_errors_become_priorities_by_the_alpha_of_their_time() -> None:
    config = dataclasses.replace(CONFIG, alpha=1.0, alpha_end=0.0, epsilon=0.0)
    behind = [0.0]
    made = source(config, progress=lambda: behind[0])
    for share, priority in ((0.0, 4.0), (0.5, 2.0), (1.0, 1.0)):
        behind[0] = share
        batch = next(made)
        batch.feedback(torch.full((8,), 4.0))
        assert made.fields()["alpha"] == 1.0 - share
        drawn = made.replay.sampler.tree.priorities[batch.keys]
        torch.testing.assert_close(drawn, torch.full((8,), priority))


def test_what_is_drawn_is_what_was_played() -> None:
    """Scripted simulators show what number of observation it is, so every field has one right value."""
    made = source()
    for _, batch in zip(range(60), made, strict=False):
        data = batch.data
        simulator = torch.div(data.observation[:, 0], 1000, rounding_mode="floor").long()
        seen = data.observation[:, 0].long() % 1000
        after = data.next_observation[:, 0].long() % 1000
        for row in range(8):
            script = SCRIPT[simulator[row]]
            # an ending shows two observations: the last one, and the next episode's first
            shown, step = 0, 0
            while shown != seen[row]:
                shown += 1 + bool(script[step % len(script)][1])
                step += 1
            reward, end = script[step % len(script)]
            assert data.reward[row] == reward
            assert data.discount[row] == pytest.approx(0.0 if end == "terminated" else 0.9)
            if end != "terminated":
                assert after[row] == seen[row] + 1


def test_errors_become_priorities() -> None:
    made = source()
    batch = next(made)
    batch.feedback(torch.linspace(0.0, 7.0, 8))
    drawn = made.replay.choose(8, 0.4).keys
    heavy = batch.data.keys[-3:]
    counts = sum(int(torch.isin(made.replay.choose(8, 0.4).keys, heavy).sum()) for _ in range(50))
    assert len(drawn) == 8
    assert counts > 2 * 50 * 8 * 3 / len(made.replay)
    batch.feedback(None)  # nothing to tell


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("double_buffer", [False, True])
def test_it_goes_on_bit_for_bit(ahead: int, double_buffer: bool) -> None:
    world = world_called("cartpole")

    def groups():
        sizes = [2, 2] if double_buffer else [4]
        return [world.open(n, training=True, first=4 - n if g else 0) for g, n in enumerate(sizes)]

    config = dataclasses.replace(CONFIG, capacity=200, ahead=ahead)
    one = source(config, groups=groups())
    two = source(config, groups=groups(), seed=9)
    one.policy = two.policy = Chooser()
    for _ in range(300):
        next(one).feedback(torch.rand(8, generator=torch.Generator().manual_seed(1)))
    assert one.exact
    two.load(clone(one.state()))
    for _ in range(40):
        a, b = next(one), next(two)
        assert a.env_steps == b.env_steps
        for name in ("keys", "weights", "observation", "action", "reward", "discount", "next_observation"):
            assert torch.equal(getattr(a.data, name), getattr(b.data, name)), name
        for batch in (a, b):
            batch.feedback(batch.data.observation[:, 0])
    one.close()
    two.close()


def test_without_its_replay_a_learner_goes_on_as_soon_as_it_can() -> None:
    one = source(dataclasses.replace(CONFIG, saved=False))
    for _ in range(50):
        next(one)
    assert not one.exact
    state = one.state()
    assert state["replays"] == {}
    two = source(dataclasses.replace(CONFIG, saved=False))
    two.load(state)
    assert next(two).env_steps == 8  # a batch, and not the 20 steps of a beginning


def test_a_state_of_other_simulators_is_refused() -> None:
    made = source()
    next(made)
    with pytest.raises(ValueError, match="2 simulators in 1 groups"):
        source(groups=[ScriptedSimulators(SCRIPT[:1])]).load(made.state())


class Chooser(Counter):
    """Left or right."""

    def act(self, observation, memory, first, generator, greedy=False):
        action = super().act(observation, memory, first, generator, greedy)
        return action._replace(action=action.action % 2)


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(inner) for key, inner in value.items()}
    return [clone(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def test_whoever_waits_long_is_asked_whether_to_go_on() -> None:
    made = source(dataclasses.replace(CONFIG, learning_starts=10_000))
    asked = []

    def alive(played: int) -> bool:
        asked.append(played)
        return played >= 100

    made.alive = alive
    batch = next(made)
    assert batch.data is None
    assert batch.env_steps == 100
    assert asked == list(range(0, 101, 2))


def test_the_remedy_for_a_run_that_ends_before_it_learns_works() -> None:
    run = dataclasses.replace(recipe("cartpole-dqn"), env_steps=600)
    seldom = dataclasses.replace(
        run.source, replay=dataclasses.replace(run.source.replay, samples_per_insert=0.1)
    )
    with pytest.raises(Refusal, match="do not suffice for an update"):
        dataclasses.replace(run, env_steps=1_100, source=seldom).validate()
    with pytest.raises(Refusal, match="a batch has 64 transitions"):
        dataclasses.replace(run, env_steps=40).validate()
    with pytest.raises(Refusal, match=r"Use more --env-steps, or --replay\.learning-starts 300\."):
        preflight(run)
    preflight(altered(run, replay=dataclasses.replace(run.source.replay, learning_starts=300)))


def test_a_run_whose_actions_are_all_random_is_refused() -> None:
    run = dataclasses.replace(recipe("pendulum-td3"), env_steps=800)
    replay = dataclasses.replace(run.source.replay, learning_starts=400)
    both = r"--replay\.learning-starts 400 --random-env-steps 400\."
    with pytest.raises(Refusal, match=both):
        preflight(run)
    with pytest.raises(Refusal, match=r"never act\. Use more --env-steps, or --random-env-steps 400\."):
        preflight(altered(run, replay=replay))
    preflight(altered(run, replay=replay, random_env_steps=400))
