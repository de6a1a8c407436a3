"""MBPO and MEMR: what they imagine, what their updates change, and the rollout policy's priorities."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal

import agreeing
from murmurate.agents._dynamics import ModelConfig
from murmurate.agents._model_based import PolicySettings
from murmurate.agents.mbpo import MBPO
from murmurate.agents.memr import MEMR
from murmurate.errors import Refusal
from murmurate.replay.interface import Sample
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, updates_of
from murmurate.spec import Batch, EnvSpec
from murmurate.worlds.terminations import hopper

SPEC = EnvSpec(
    "hopper", (11,), torch.float32, 0, action_shape=(3,), action_low=(-2.0,) * 3, action_high=(2.0,) * 3
)
POLICY = PolicySettings(batch=32, hidden=16)
MODEL = ModelConfig(members=3, elites=2, layers=2, hidden=16, batch=32, patience=1)
CONFIGS = [MBPO(POLICY, MODEL), MEMR(POLICY, MODEL)]
SOON_ENDED = dataclasses.replace(MODEL, improvement=0.9)  # a fit of as few epochs as there can be


def built(config: Any, replicate: Any = Replica, spec: EnvSpec = SPEC) -> Any:
    return config.build(Context(spec, replicate, seed=3))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def transitions(size: int = 200) -> dict[str, torch.Tensor]:
    """Of a world that moves by the mean action, with the reward 3."""
    observation, action = drawn(size, 11), drawn(size, 3, seed=1).clamp(-2, 2)
    following = observation + action.mean(1, keepdim=True)
    return {
        "observation": observation,
        "action": action,
        "reward": torch.full((size,), 3.0),
        "next_observation": following,
    }


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_a_termination_that_does_not_fit_is_refused(config: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def far(observation):\n    return observation > 2\n")
    with pytest.raises(Refusal, match=r"gives bool \[2, 11\]"):
        built(dataclasses.replace(config, termination=f"{tmp_path}/mine.py:far"))


def test_what_is_imagined_is_what_the_model_learned() -> None:
    longer = dataclasses.replace(
        MODEL, patience=5, hidden=64, learning_rate=3e-3, batch=64, precision="float32"
    )
    agent = built(MEMR(POLICY, longer))
    assert agent.fit(transitions(2_000), lambda: False)
    start = drawn(300, 11, seed=7)
    step = agent.imagine(start)
    assert step.observation is start
    assert (step.action.abs() <= 2).all()
    assert step.action.std() > 0.3, "a draw from the policy, not its mode"
    moved = step.next_observation - start
    assert (moved - step.action.mean(1, keepdim=True)).square().mean().sqrt() < 0.25
    assert (step.reward - 3).square().mean().sqrt() < 0.25
    assert torch.equal(step.terminated, hopper(step.next_observation))


def test_a_fit_to_few_transitions_is_not_over_after_a_few_steps() -> None:
    """Its epochs are one gradient step long, and a patience of five of them would see no improvement."""
    agent = built(CONFIGS[0])
    agent.world_model.dynamics.config = dataclasses.replace(MODEL, patience=2, batch=256, improvement=0.5)
    assert agent.fit(transitions(300), lambda: False)
    assert agent.world_model.dynamics.epochs > 2 * 20


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_each_part_changes_its_own_replicas_alone(config: Any) -> None:
    agent = built(dataclasses.replace(config, model=SOON_ENDED))
    policy = {"policy", "critic", "temperature"}
    everything = policy | {"model"} | ({"rollout_policy"} if config.requires.priorities else set())
    assert set(agent.replicas) == everything
    before = {name: replica.params.detach().clone() for name, replica in agent.replicas.items()}

    def changed() -> set[str]:
        found = {n for n, r in agent.replicas.items() if not torch.equal(r.params.detach(), before[n])}
        before.update({n: r.params.detach().clone() for n, r in agent.replicas.items()})
        return found

    agent.fit(transitions(), lambda: False)
    assert changed() == {"model"}
    assert updates_of(agent) == 0, "fits are no updates of the policy"
    imagined = agent.imagine(drawn(40, 11))
    assert (imagined.priority is not None) == config.requires.priorities
    assert changed() == everything - policy - {"model"}
    data = transitions(32)
    sample = Sample(torch.arange(32), torch.ones(32), discount=torch.full((32,), 0.9), **data)
    outcome = agent.learn(Batch(sample))
    assert changed() == policy
    assert updates_of(agent) == 1
    assert outcome.read_metrics()["model_error"] == pytest.approx(agent.world_model.dynamics.error)


def test_the_weights_of_a_batch_scale_the_critics_errors() -> None:
    """Line 19 of Algorithm 2: with weights of 0 the critics do not move, and the policy does."""
    agent = built(MEMR(POLICY, MODEL))
    critic, policy = (agent.replicas[name].params.detach().clone() for name in ("critic", "policy"))
    sample = Sample(torch.arange(32), torch.zeros(32), discount=torch.full((32,), 0.9), **transitions(32))
    agent.learn(Batch(sample))
    assert torch.equal(agent.replicas["critic"].params.detach(), critic)
    assert not torch.equal(agent.replicas["policy"].params.detach(), policy)


def test_the_rollout_policy_learns_the_distribution_of_imagined_actions() -> None:
    """A Gaussian whose mean depends on the state; priorities are then z^2 / 2 of it, in places of [-1, 1]."""
    agent = built(MEMR(POLICY, MODEL, rollout_rate=3e-3, rollout_epochs=60))
    observation, noise = drawn(1_000, 11), drawn(1_000, 3, seed=1)
    mean, std = 0.5 * torch.tanh(observation[:, :3]), torch.tensor([0.1, 0.2, 0.4])
    agent.rollouts.fit(observation, mean + std * noise, torch.Generator().manual_seed(0))
    z = (torch.linspace(-3, 3, 3)).expand(1_000, 3)
    found = agent.rollouts.priority(observation, mean + std * z)
    assert found.median().item() == pytest.approx(z[0].square().mean().item() / 2, rel=0.25)
    slow = 0.0
    mu, log_std = (x[0] for x in agent.rollouts._distribution(observation[:1]))
    action = (mean + std * z)[0] / 2  # its place between bounds of +-2
    for d in range(3):
        density = Normal(mu[d], log_std[d].exp()).log_prob(action[d])
        slow -= (0.5 * math.log(2 * math.pi) + density + log_std[d]).item() / 3
    assert found[0].item() == pytest.approx(slow, rel=1e-4)


def test_priorities_are_limited() -> None:
    agent = built(MEMR(POLICY, MODEL))
    observation = drawn(50, 11)
    mean, log_std = agent.rollouts._distribution(observation)
    far = 2 * (mean + 1e3 * log_std.exp())
    assert (agent.priority(observation, far) == 50).all()
    assert agent.priority(observation, 2 * mean) == pytest.approx(1e-4)


class Rounds:
    """A strategy of rounds of three updates, which records the clocks between them."""

    def __call__(self, name: str, module: Any, make: Any, **options: Any) -> Replica:
        replica = Replica(name, module, make, **options)
        replica.exchange = agreeing.every(3, heard=1)
        return replica


@pytest.mark.parametrize("size", [200, 230])  # epochs of 5 updates of the model; 7 and 8 of the policy
def test_fits_end_with_a_round(size: int) -> None:
    """Else replicas would differ, and the others would wait for the rest of the round."""
    agent = built(MEMR(POLICY, SOON_ENDED), Rounds())
    agent.fit(transitions(size), lambda: False)
    agent.imagine(drawn(size, 11))
    for name in ("model", "rollout_policy"):
        clock = agent.replicas[name].clock
        assert clock > 0
        assert clock % 3 == 0


def test_actions_that_are_no_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="discrete"):
        built(CONFIGS[0], spec=EnvSpec("hopper", (11,), torch.float32, 4))


def test_a_history_of_observations_is_refused() -> None:
    with pytest.raises(ValueError, match="predicts one observation: leave out frame_stack"):
        built(CONFIGS[0], spec=dataclasses.replace(SPEC, history=2))


def test_whole_numbers_as_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="observations of hopper are uint8: convert them to float32"):
        built(CONFIGS[0], spec=dataclasses.replace(SPEC, observation_dtype=torch.uint8))
