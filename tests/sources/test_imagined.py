"""Imagined batches: when the model is fitted and rolled out, what is kept and drawn, and exact resumption."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from laws.problems import same
from murmurate.agents.interface import Action, Imagined
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.sources.imagined import ImaginedSourceConfig, ModelRollouts
from murmurate.sources.imagined_sampler import ImaginedSampler
from murmurate.sources.replay_source import ReplaySource
from murmurate.spec import EnvSpec, Model
from murmurate.worlds.gym import GymWorld
from murmurate.worlds.registry import world
from murmurate.worlds.terminations import termination
from short_runs import altered, preflight

ROLLOUTS = ModelRollouts(every=4, starts=8, kept=3, length_end=3, grows_after=8, grows_until=16)
CONFIG = ImaginedSourceConfig(
    simulators=2, learning_starts=10, updates_per_step=2.0, fit_every=6, real_share=0.25, rollouts=ROLLOUTS
)
PRIORITISED = dataclasses.replace(ROLLOUTS, length_end=1, every=2, alpha=1.0, beta=0.5, beta_end=0.5)


class Dreamer:
    """A model agent whose imagined observations are those of the world plus 100 a step. It ends every rollout
    that began at a negative first number; its reward is the number of the call, and priorities are those that
    ``priority_of`` gives."""

    def __init__(self, refuses: int = 0) -> None:
        self.fits: list[int] = []
        self.starts: list[Tensor] = []
        self.learned: list[bool] = []
        self.refuses = refuses  # how many fits are interrupted first

    def initial_memory(self, batch: int) -> None:
        return None

    def act(
        self, observation: Tensor, memory: Any, first: Any, generator: Any, greedy: bool = False
    ) -> Action:
        return Action(torch.rand(len(observation), 1, generator=generator), None)

    def fit(self, transitions: dict[str, Tensor], interrupted: Any) -> bool:
        if self.refuses:
            self.refuses -= 1
            return False
        self.fits.append(len(transitions["reward"]))
        return not interrupted()

    def imagine(self, observation: Tensor, learn: bool = True) -> Imagined:
        self.starts.append(observation.clone())
        self.learned.append(learn)
        reward = torch.full((len(observation),), float(len(self.starts)))
        action = torch.zeros(len(observation), 1)
        following = observation + torch.tensor([0.0, 0.0, 100.0])
        return Imagined(
            observation, action, reward, following, observation[:, 0] < 0, self.priority(observation, action)
        )

    def priority(self, observation: Tensor, action: Tensor) -> Tensor:
        return priority_of(observation)


def priority_of(observation: Tensor) -> Tensor:
    return torch.where(observation[:, 0] < 0, 4.0, 1.0)


def made(config: ImaginedSourceConfig = CONFIG, learner: Any = None, seed: int = 0) -> ReplaySource:
    simulators = world("pendulum").open(2, training=True)
    learner, spec = learner or Dreamer(), simulators.spec
    sampler = ImaginedSampler(
        config,
        Model(batch=8, discount=0.9, priorities=config.rollouts.alpha > 0),
        spec,
        learner,
        seed=seed,
        device=torch.device("cpu"),
        progress=lambda: 0.0,
    )
    source = ReplaySource([simulators], learner, sampler, seed=seed, random_env_steps=config.learning_starts)
    sampler.alive = lambda played: source.alive(played)
    return source


def sampler_of(source: ReplaySource) -> ImaginedSampler:
    return source.sampler  # type: ignore[return-value]


def test_fits_rollouts_and_batches_have_their_numbers() -> None:
    learner = Dreamer()
    source = made(learner=learner)
    played = [batch.env_steps for _, batch in zip(range(37), source, strict=False)]
    # 10 env steps first, then 2 updates for each of 2 simulators' steps
    assert [number for number, steps in enumerate(played) if steps] == list(range(0, 37, 4))
    assert CONFIG.batches_at_once(recipe("inverted-pendulum-mbpo")) == 4
    assert played[0] == 12
    assert set(played[4::4]) == {2}
    # every 6 env steps = 12 batches, of all transitions
    assert learner.fits == [12, 18, 24, 30]
    # every 4 env steps = 8 batches; rollouts of one step until env step 8 after the start, then longer
    fields = source.fields()
    assert [len(starts) for starts in learner.starts[:3]] == [8, 8, 8]
    assert fields["rollout_length"] == 3
    assert fields["imagined_transitions"] == sum(len(starts) for starts in learner.starts)
    assert fields["model_replay_transitions"] <= ROLLOUTS.capacity(3)
    source.close()


def test_it_goes_on_without_replays_that_were_damaged() -> None:
    source = made()
    for _ in range(10):
        next(source)
    state = source.state()
    learner = Dreamer()
    again = made(learner=learner)
    again.load(state | {"replays": {}})
    assert not again.exact
    assert len(sampler_of(again).replay) == 0
    assert sampler_of(again).imagined == sampler_of(source).imagined
    next(again)
    assert sampler_of(again).batches == 11
    assert learner.learned == [False]  # other replicas make no round of rollouts now
    for _ in range(6):
        next(again)
    assert learner.learned == [False, True]
    again.fresh_start(0)  # before any replica has learned: with the 10 random env steps
    assert next(again).env_steps == 12
    for each in (source, again):
        each.close()


def test_too_few_rollouts_for_a_batch_are_refused() -> None:
    run = recipe("inverted-pendulum-mbpo")
    rollouts = dataclasses.replace(run.source.rollouts, starts=100)  # type: ignore[attr-defined]
    few = dataclasses.replace(run, source=dataclasses.replace(run.source, rollouts=rollouts))  # type: ignore[type-var]
    with pytest.raises(Refusal, match=r"--rollouts.starts 244"):
        few.validate()


def test_a_single_transition_for_a_fit_is_refused() -> None:
    run: Any = recipe("inverted-pendulum-mbpo")
    policy = dataclasses.replace(run.learner.policy, batch=1)
    source, learner = (
        dataclasses.replace(run.source, learning_starts=1),
        dataclasses.replace(run.learner, policy=policy),
    )
    with pytest.raises(Refusal, match=r"tested on another\. Use --learning-starts 2"):
        dataclasses.replace(run, source=source, learner=learner).validate()


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"updates_per_step": 1.0}, "--agent.policy.batch 100"),
        ({"updates_per_step": 0.001}, "--updates-per-step"),
    ],
)
def test_a_run_without_an_update_is_refused(fields: dict[str, float], remedy: str) -> None:
    run = recipe("inverted-pendulum-mbpo")
    source: Any = dataclasses.replace(run.source, learning_starts=100, **fields)  # type: ignore[type-var]
    env_steps = 200 if "batch" in remedy else 1_000
    with pytest.raises(Refusal, match=remedy):
        dataclasses.replace(run, source=source, env_steps=env_steps).validate()


def test_rollouts_begin_at_real_states_and_end_where_the_model_says() -> None:
    learner = Dreamer()
    source = made(dataclasses.replace(CONFIG, rollouts=dataclasses.replace(ROLLOUTS, length=3)), learner)
    next(source)
    real = sampler_of(source).replay.rows.column("observation")[:12]
    first, second, third = learner.starts
    assert all((row == real).all(1).any() for row in first)
    living = first[first[:, 0] >= 0]
    assert 0 < len(living) < 8, "some ended at once"
    assert torch.equal(second, living + torch.tensor([0.0, 0.0, 100.0]))
    assert torch.equal(third, living + torch.tensor([0.0, 0.0, 200.0]))
    stored = sampler_of(source).model_replay.rows
    count = 8 + 2 * len(living)
    ended = stored.column("observation")[:count, 0] < 0
    assert torch.equal(stored.column("discount")[:count] == 0, ended)
    assert stored.column("discount")[:count][~ended] == pytest.approx(0.9)
    source.close()


def test_a_share_of_each_batch_is_real() -> None:
    source = made()
    for _, batch in zip(range(20), source, strict=False):
        data = batch.data
        assert len(data.reward) == 8
        assert (data.reward <= 0).sum() == 2, "pendulum's rewards are costs, imagined ones are above 0"
        assert (data.weights == 1).all()
    source.close()
    for share, real in ((0.0, 0), (1.0, 8)):
        source = made(dataclasses.replace(CONFIG, real_share=share))
        assert (next(source).data.reward <= 0).sum() == real
        source.close()


def test_the_model_replay_grows_with_the_rollouts_and_keeps_what_it_had() -> None:
    learner = Dreamer()
    source = made(dataclasses.replace(CONFIG, real_share=0.0), learner)
    sampler = sampler_of(source)
    seen = []
    for _, _ in zip(range(40), source, strict=False):
        store = sampler.model_replay
        size = store.sampler.capacity
        assert size == ROLLOUTS.capacity(source.fields()["rollout_length"])
        numbers = torch.arange(max(0, store.inserted - size), store.inserted) % size
        seen.append(store.rows.column("reward")[numbers].tolist())
    calls = [call + 1 for call, starts in enumerate(learner.starts) for _ in starts]
    for kept in seen:
        assert kept in [calls[end - len(kept) : end] for end in range(len(kept), len(calls) + 1)]
    assert len(seen[-1]) > ROLLOUTS.capacity(1)
    source.close()


@pytest.mark.parametrize("served", [False, True])
def test_a_model_is_shown_how_episodes_end(served: bool) -> None:
    """The real replay holds the last observation of an episode, not the first of the next one."""
    pytest.importorskip("mujoco")
    simulators = GymWorld("Hopper-v5", max_episode_steps=12, served=served).open(2, training=True)
    config = dataclasses.replace(CONFIG, learning_starts=150)
    requires = Model(batch=8, discount=0.9)
    sampler = ImaginedSampler(
        config, requires, simulators.spec, Dreamer(), seed=0, device=torch.device("cpu"), progress=lambda: 0.0
    )
    source = ReplaySource([simulators], Dreamer(), sampler, seed=0, random_env_steps=150)
    while sampler.played < 150:
        source._start()
        source._step_all()
    rows = {n: sampler.replay.rows.column(n)[:150] for n in ("observation", "next_observation", "discount")}
    ended = rows["discount"] == 0
    assert 0 < ended.sum() < 50
    assert torch.equal(termination("hopper")(rows["next_observation"]), ended)
    assert (rows["next_observation"] - rows["observation"])[:, 0].abs().max() < 0.1, "no jump to a beginning"
    source.close()


# -- priorities (MEMR) -------------------------------------------------------------------------------------


def test_states_are_drawn_by_priority_and_weighted_within_their_round() -> None:
    rollouts = dataclasses.replace(PRIORITISED, starts=400)
    learner = Dreamer()
    source = made(dataclasses.replace(CONFIG, real_share=0.0, rollouts=rollouts), learner)
    for _, batch in zip(range(40), source, strict=False):
        data = batch.data
        assert len(data.reward.unique()) == 1, "a batch is of a single round"
        preferred = data.observation[:, 0] < 0  # drawn 4 times as often: weights (1/4) ** 0.5
        torch.testing.assert_close(data.weights, torch.where(preferred, 0.5, 1.0))
    real = sampler_of(source).replay
    values = real.rows.column("observation")[: len(real)]
    chances = priority_of(values) / priority_of(values).sum()
    expected = chances[values[:, 0] < 0].sum()
    last = learner.starts[-1]
    assert (last[:, 0] < 0).float().mean() == pytest.approx(expected.item(), abs=0.1)
    source.close()


def test_the_greatest_weight_of_real_transitions_is_1_too() -> None:
    source = made(dataclasses.replace(CONFIG, real_share=1.0, rollouts=PRIORITISED))
    weights = torch.stack([batch.data.weights for _, batch in zip(range(20), source, strict=False)])
    assert (weights.amax(1) == 1).all()
    assert weights.min() == pytest.approx(0.5), "priorities are 1 and 4, and beta is a half"
    source.close()


def test_real_transitions_weigh_as_much_as_imagined_ones_in_the_mean() -> None:
    rollouts = dataclasses.replace(PRIORITISED, starts=400)
    source = made(dataclasses.replace(CONFIG, real_share=0.5, rollouts=rollouts))
    seen: set[bool] = set()
    for _, batch in zip(range(40), source, strict=False):
        real, weights = batch.data.reward <= 0, batch.data.weights
        torch.testing.assert_close(weights[real].mean(), weights[~real].mean())
        preferred = batch.data.observation[:, 0] < 0  # priorities are 1 and 4, and beta is a half
        expected = torch.where(preferred, 0.5, 1.0)
        torch.testing.assert_close(weights[~real], expected[~real])
        torch.testing.assert_close(weights[real] / weights[real].max(), expected[real] / expected[real].max())
        seen |= set(preferred[real].tolist())
    assert seen == {False, True}
    source.close()


def test_rounds_are_drawn_alike_and_the_oldest_is_dropped() -> None:
    source = made(dataclasses.replace(CONFIG, real_share=0.0, rollouts=PRIORITISED))
    rounds = [batch.data.reward[0].item() for _, batch in zip(range(400), source, strict=False)]
    for number, drawn in enumerate(rounds):
        newest = number // 4 + 1
        assert max(1, newest - 2) <= drawn <= newest
    ages = torch.tensor([number // 4 + 1 - drawn for number, drawn in enumerate(rounds)][8:])
    assert (ages.long().bincount() / len(ages) - 1 / 3).abs().max() < 0.08
    source.close()


def test_priorities_follow_the_agent() -> None:
    source = made(dataclasses.replace(CONFIG, rollouts=PRIORITISED))
    for _, _ in zip(range(8), source, strict=False):
        sampler = sampler_of(source)
        size = len(sampler.replay)
        expected = priority_of(sampler.replay.rows.column("observation")[:size]).sum()
        assert sampler.replay.sampler.mass[0] == pytest.approx(expected.item(), rel=1e-4)
    source.close()


# -- interruption and resumption ---------------------------------------------------------------------------


def test_an_interrupted_fit_ends_the_iteration_and_is_made_again() -> None:
    learner = Dreamer(refuses=1)
    source = made(learner=learner)
    batch = next(source)
    assert batch.data is None
    assert batch.env_steps == 12
    assert not learner.fits
    again = next(source)
    assert again.data is not None
    assert learner.fits == [12]
    source.close()


@pytest.mark.parametrize("rollouts", [ROLLOUTS, PRIORITISED])
def test_saved_and_loaded_equals_uninterrupted(rollouts: ModelRollouts) -> None:
    config = dataclasses.replace(CONFIG, rollouts=rollouts)
    one = made(config)
    for _, _ in zip(range(30), one, strict=False):
        pass
    state = one.state()
    assert set(state["replays"]) == {"replay", "model_replay"}
    learner = Dreamer()
    learner.starts = [torch.zeros(0)] * len(one.policy.starts)  # type: ignore[attr-defined]
    other = made(config, learner)
    other.load(state)
    for _, ours, theirs in zip(range(40), one, other, strict=False):
        assert same(vars(ours.data), vars(theirs.data))
    assert one.fields() == other.fields()
    one.close()
    other.close()


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("hopper-mbpo", {"alpha": 0.6}, r"mbpo gives states no priorities. Use --rollouts.alpha 0"),
        ("hopper-memr", {"length_end": 4}, r"Use --rollouts.length 1 --rollouts.length-end 1"),
        ("hopper-mbpo", {"grows_until": 10, "grows_after": 20}, r"Use --rollouts.grows-until 21"),
    ],
)
def test_rollouts_that_make_no_sense_are_refused(name: str, fields: dict[str, Any], said: str) -> None:
    run = recipe(name)
    rollouts = dataclasses.replace(run.source.rollouts, **fields)
    with pytest.raises(Refusal, match=said):
        preflight(altered(run, rollouts=rollouts))


def test_a_run_that_ends_before_it_learns_is_refused() -> None:
    with pytest.raises(Refusal, match="5,000 env steps and begins to learn after 5,000"):
        preflight(altered(recipe("hopper-mbpo"), env_steps=5_000))
    with pytest.raises(Refusal, match="capacity is 100 and a batch is 256"):
        preflight(altered(recipe("hopper-memr"), capacity=100))


def test_discrete_actions_and_unknown_ends_are_refused() -> None:
    for name, said in (("cartpole", "discrete"), ("mountain-car-continuous", "--agent.termination")):
        with pytest.raises((Refusal, ValueError), match=said):
            preflight(recipe(f"{name}-mbpo"))


def test_the_length_of_rollouts() -> None:
    hopper = recipe("hopper-mbpo").source.rollouts
    assert [hopper.length_after(t) for t in (0, 20_000, 29_300, 85_000, 150_000, 10**6)] == [
        1,
        1,
        2,
        8,
        15,
        15,
    ]
    assert hopper.capacity(2) == 800_000


def test_plain_memory_is_counted() -> None:
    run = recipe("hopper-mbpo")
    spec = EnvSpec("hopper", (11,), torch.float32, 0, (3,))
    row = 4 * (2 * 11 + 3 + 2)
    assert run.world.spec().observation_shape == spec.observation_shape
    assert run.source.saved_bytes(run) >= row * (1_000_000 + 4 * 100_000 * 15)
    assert run.source.memory_bytes(run) > run.source.saved_bytes(run)
