"""D4PG: whole updates against plain autograd in float64, what each update may change, and images."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agents.test_vector_actions import SPEC, in_double, mlp, place, sample, vectors
from losses.test_categorical import in_the_papers_notation
from murmurate.agents.d4pg import D4PG
from murmurate.evaluation.games import evaluate
from murmurate.nets.d4pg import random_shift
from murmurate.recipes import recipe
from murmurate.replay.interface import Sample
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec
from murmurate.training.members import build_learner, open_only_source

BATCH = 8
VECTORS = D4PG(batch=BATCH, hidden=16, atoms=11, v_min=-4.0, v_max=4.0, target_every=2, polyak=0.3)
IMAGES = dataclasses.replace(VECTORS, shift=2)
SHAPE = (9, 40, 40)
PIXELS = EnvSpec(
    "seen", SHAPE, torch.uint8, actions=0, action_shape=(2,), action_low=(-2.0, 0.0), action_high=(2.0, 3.0),
    stacked=True, channels=3,
)  # fmt: skip


def agent(config: D4PG = VECTORS, replicate: Any = Replica, spec: EnvSpec = SPEC) -> Any:
    return config.build(Context(spec, replicate, 0))


def pictures(seed: int) -> Sample:
    """Transitions between images."""
    g, drawn = torch.Generator().manual_seed(seed), sample(seed)
    seen, following = torch.randint(256, (2, BATCH, *SHAPE), dtype=torch.uint8, generator=g)
    return dataclasses.replace(drawn, observation=seen, next_observation=following)


CASES = [
    pytest.param(VECTORS, SPEC, sample, id="vectors"),
    pytest.param(IMAGES, PIXELS, pictures, id="images"),
]


def test_updates_are_those_of_the_paper_s_algorithm() -> None:
    """Barth-Maron et al. 2018, Algorithm 1, with autograd and the projection in the paper's sums."""
    made = agent(replicate=in_double)
    made.critic.support = torch.linspace(-4, 4, 11, dtype=torch.float64)
    made._target_critic.net.support = made.critic.support
    z = made.critic.support
    policy, q = mlp(made.policy.net), mlp(made.critic.net)
    target_policy, target_q = mlp(made.policy.net), mlp(made.critic.net)
    of_policy, of_critic = (torch.optim.Adam(net.parameters(), lr=1e-4) for net in (policy, q))
    for t in range(1, 6):
        data = sample(t, torch.float64)
        with torch.no_grad():
            following = torch.cat([data.next_observation, target_policy(data.next_observation).tanh()], 1)
            y = in_the_papers_notation(data.reward, data.discount, target_q(following).softmax(1), z)
        logits = q(torch.cat([data.observation, place(data.action)], 1))
        each = -(y * logits.log_softmax(1)).sum(1)
        of_critic.zero_grad()
        (data.weights * each).mean().backward()
        of_critic.step()
        taken = policy(data.observation).tanh()
        of_policy.zero_grad()
        (-(q(torch.cat([data.observation, taken], 1)).softmax(1) * z).sum(1).mean()).backward()
        of_policy.step()
        if t % 2 == 0:
            with torch.no_grad():
                for own, new in zip(
                    [*target_policy.parameters(), *target_q.parameters()],
                    [*policy.parameters(), *q.parameters()],
                    strict=True,
                ):
                    own += 0.3 * (new - own)
        outcome = made.learn(Batch(data))
        torch.testing.assert_close(outcome.priorities, each.detach(), rtol=1e-9, atol=1e-11)
    for net, plain in (
        (made.policy.net, policy),
        (made.critic.net, q),
        (made._target_policy.net.net, target_policy),
        (made._target_critic.net.net, target_q),
    ):
        for ours, theirs in zip(mlp(net).parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def frozen(name: str) -> Any:
    """A ``replicate`` whose replica ``name`` does not step."""

    def replicate(own: str, module: nn.Module, make: Any, **options: Any) -> Replica:
        replica = Replica(own, module, make, **options)
        if own == name:
            replica.update = replica.tick  # type: ignore[method-assign]
        return replica

    return replicate


@pytest.mark.parametrize(("config", "spec", "drawn"), CASES)
@pytest.mark.parametrize(("still", "moves"), [("critic", "policy"), ("policy", "critic")])
def test_each_update_changes_its_own_replica_alone(
    still: str, moves: str, config: D4PG, spec: EnvSpec, drawn: Any
) -> None:
    made = agent(config, frozen(still), spec)
    before = vectors(made)
    made.learn(Batch(drawn(1)))
    after = vectors(made)
    assert torch.equal(before[still], after[still])
    assert not torch.equal(before[moves], after[moves])


def test_the_encoder_learns_from_the_critic_s_loss_alone() -> None:
    """Its gradient is that of the cross-entropy, and is the same whatever the policy's update is."""
    one, other = agent(IMAGES, spec=PIXELS), agent(IMAGES, spec=PIXELS)
    other._update_policy = lambda features: torch.zeros(())
    for each in (one, other):
        each.learn(Batch(pictures(1)))
    gradient = dict(one.replicas["critic"].named_views(one.replicas["critic"].grad))
    of_encoder = [x for name, x in gradient.items() if name.startswith("encoder.")]
    assert of_encoder
    assert all(x.abs().sum() > 0 for x in of_encoder)
    assert not torch.equal(one.replicas["policy"].params, other.replicas["policy"].params)
    assert torch.equal(one.replicas["critic"].grad, other.replicas["critic"].grad)
    assert torch.equal(one.replicas["critic"].params, other.replicas["critic"].params)


@pytest.mark.parametrize(
    ("low", "high", "middle"), [(-100.0, 100.0, 0.0), (0.0, 800.0, 0.0), (-9.0, -4.0, -4.0)]
)
def test_distributions_begin_around_nothing(low: float, high: float, middle: float) -> None:
    made = agent(dataclasses.replace(VECTORS, v_min=low, v_max=high, atoms=51))
    data, atom = sample(1), (high - low) / 50
    with torch.no_grad():
        features = made.policy.observation_features(data.observation)
        p = made.critic(features, place(data.action).float()).softmax(1)
    mean = (p @ made.critic.support).mean()
    deviation = (p * (made.critic.support - mean) ** 2).sum(1).sqrt().mean()
    assert abs(float(mean) - middle) < 3 * atom
    assert atom < float(deviation) < 4 * atom


NORMALIZED = dataclasses.replace(VECTORS, normalize_observations=True)


@pytest.mark.parametrize(
    ("config", "spec", "drawn"), [*CASES, pytest.param(NORMALIZED, SPEC, sample, id="normalized")]
)
def test_saved_and_loaded_it_goes_on_as_if_uninterrupted(config: D4PG, spec: EnvSpec, drawn: Any) -> None:
    made, restored = agent(config, spec=spec), agent(config, spec=spec)
    for update in range(1, 4):
        made.learn(Batch(drawn(update)))
    for name, replica in made.replicas.items():
        restored.replicas[name].load(replica.state())
    restored.load(made.state())
    for update in range(4, 8):
        priorities = [each.learn(Batch(drawn(update))).priorities for each in (made, restored)]
        assert torch.equal(*priorities)
    for name, vector in vectors(made).items():
        assert torch.equal(vector, restored.replicas[name].params), name


@pytest.mark.parametrize(("config", "spec", "drawn"), CASES)
def test_actions_lie_between_their_bounds_and_are_greedy_without_noise(
    config: D4PG, spec: EnvSpec, drawn: Any
) -> None:
    made, generator = agent(config, spec=spec), torch.Generator().manual_seed(0)
    observation, first = drawn(3).observation, torch.ones(BATCH, dtype=torch.bool)
    low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
    explored = made.act(observation, None, first, generator).action
    greedy, again = (made.act(observation, None, first, generator, greedy=True).action for _ in range(2))
    for action in (explored, greedy):
        assert ((action >= low) & (action <= high)).all()
    assert torch.equal(greedy, again)
    assert not torch.equal(explored, greedy)
    assert made.acting == (("policy", "critic") if spec.images else ("policy",))


def test_in_bfloat16_updates_are_nearly_the_same() -> None:
    one, other = (
        agent(dataclasses.replace(IMAGES, precision=p), spec=PIXELS) for p in ("float32", "bfloat16")
    )
    low = {p.dtype for p in other.critic.encoder.torso.parameters()}
    assert low == {torch.bfloat16}
    assert {p.dtype for p in other.critic.encoder.norm.parameters()} == {torch.float32}
    losses = [float(each.learn(Batch(pictures(1))).read_metrics()["loss"]) for each in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_shifted_images_are_crops_of_the_image_with_its_edges_repeated() -> None:
    images = torch.arange(2 * 3 * 5 * 6).view(2, 3, 5, 6).to(torch.uint8).repeat(40, 1, 1, 1)
    moved = random_shift(images, 2, torch.Generator().manual_seed(0))
    padded = nn.functional.pad(images.float(), (2, 2, 2, 2), mode="replicate").to(torch.uint8)
    places = set()
    for image, around in zip(moved, padded, strict=True):
        fits = [
            (y, x) for y in range(5) for x in range(5) if torch.equal(image, around[:, y : y + 5, x : x + 6])
        ]
        assert fits
        places.add(fits[0])
    assert len(places) > 15, "of 25, in 80 draws"
    assert torch.equal(random_shift(images, 0, torch.Generator()), images)


def test_the_shifts_of_an_update_follow_from_the_seed_and_the_rank() -> None:
    def shifted(seed: int, rank: int) -> Tensor:
        made = IMAGES.build(Context(PIXELS, Replica, seed, rank=rank))
        return made._shifted(pictures(1))[0]

    assert torch.equal(shifted(0, 0), shifted(0, 0))
    assert not torch.equal(shifted(0, 0), shifted(0, 1))
    assert not torch.equal(shifted(0, 0), shifted(1, 0))


@pytest.mark.parametrize(
    ("change", "spec", "said"),
    [
        ({"shift": 4}, SPEC, "shift is 4, and toy has no images"),
        ({"shift": min(PIXELS.observation_shape[1:])}, PIXELS, r"shift is \d+, and images of \d+ pixels"),
        ({"torso": "nature2015"}, SPEC, "torso is nature2015, and toy has no images"),
        ({"normalize_observations": True}, PIXELS, "leave it out"),
        ({"v_min": 4.0}, SPEC, "the first must be the smaller"),
        ({}, EnvSpec("chess", (3,), torch.float32, actions=4), "dqn"),
    ],
)
def test_what_it_cannot_use_is_refused(change: dict[str, Any], spec: EnvSpec, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        agent(dataclasses.replace(VECTORS, **change), spec=spec)


@pytest.mark.parametrize(
    ("name", "greatest"),
    [
        ("dmc-cartpole-swingup-pixels", 8 / 0.01),  # 1 for each of 8 steps that an action lasts, for ever
        ("dmc-walker-walk-pixels", 2 / 0.01),
        ("dmc-walker-walk", 1 / 0.01),
        ("gym:Pendulum-v1", 0.0),
        ("adroit-door", 20 / 0.01),
    ],
)
def test_a_recipe_s_support_holds_the_returns_of_its_world(name: str, greatest: float) -> None:
    for package in ("dm_control", "gymnasium_robotics"):
        pytest.importorskip(package)
    learner = recipe(f"{name}-d4pg").learner
    assert learner.v_min < greatest <= learner.v_max
    assert learner.discount == 0.99


@pytest.mark.slow
def test_from_pixels_a_resumed_run_is_the_uninterrupted_one() -> None:
    """Simulators, images of the replay, nets and their targets."""
    pytest.importorskip("dm_control")
    run = recipe("dmc-cartpole-swingup-pixels-d4pg")
    replay = dataclasses.replace(run.source.replay, capacity=300, learning_starts=12)
    source = dataclasses.replace(run.source, simulators=2, replay=replay, random_env_steps=8)
    learner = dataclasses.replace(run.learner, batch=4, hidden=16)
    run = dataclasses.replace(run, source=source, learner=learner, env_steps=1_000)

    def learn(made: Any, batches: Any, count: int) -> None:
        for _, batch in zip(range(count), batches, strict=False):
            batch.feedback(made.learn(batch).priorities)

    one, other = build_learner(run, 0, Replica), build_learner(run, 0, Replica)
    batches, again = open_only_source(run, one), open_only_source(run, other)
    learn(one, batches, 30)
    assert batches.exact
    saved = copy.deepcopy((batches.state(), one.state(), {n: r.state() for n, r in one.replicas.items()}))
    learn(one, batches, 30)
    again.load(saved[0])
    other.load(saved[1])
    for name, replica in other.replicas.items():
        replica.load(saved[2][name])
    learn(other, again, 30)
    for name, vector in vectors(one).items():
        assert torch.equal(vector, other.replicas[name].params), name
    batches.close()
    again.close()


@pytest.mark.slow
def test_it_learns_to_swing_up_a_pendulum() -> None:
    """A policy that does nothing useful has a return of about -1,200."""
    run = recipe("pendulum-d4pg")
    replay = dataclasses.replace(run.source.replay, samples_per_insert=64.0)
    learner = dataclasses.replace(run.learner, batch=64, policy_rate=1e-3, critic_rate=1e-3)
    run = dataclasses.replace(run, source=dataclasses.replace(run.source, replay=replay), learner=learner)
    made = build_learner(run, 0, Replica)
    batches = open_only_source(run, made)
    for _, batch in zip(range(9_000), batches, strict=False):
        batch.feedback(made.learn(batch).priorities)
    batches.close()
    assert evaluate(run.world, made, 10, seed=1).mean > -350
