"""TRPO: the step against a dense natural gradient, the bound on its divergence, replicas that step as one."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from murmurate.agents import trpo
from murmurate.agents.trpo import TRPO, TRPOAgent
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import NotFinite, Replica
from murmurate.replicator.collectives import Group
from murmurate.replicator.gather import TensorExchange
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec, Trajectory
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.local_sgd import LocalSGD
from oracles import policy as distributions
from oracles import ppo as oracle
from oracles import trust_region
from played import played

SPEC = EnvSpec("toy", (3,), torch.float32, actions=4)
CONTINUOUS = EnvSpec("toy", (3,), torch.float32, actions=0, action_shape=(2,))
BOTH = pytest.mark.parametrize("spec", [SPEC, CONTINUOUS], ids=["discrete", "continuous"])


def agent(spec: EnvSpec = SPEC, seed: int = 0, context: Context | None = None, **changes: Any) -> TRPOAgent:
    config = dataclasses.replace(TRPO(hidden=5, steps=12, value_epochs=2, value_minibatches=3), **changes)
    made = config.build(context or Context(spec, Replica, seed))
    with torch.no_grad():
        made.policy_net.head.get_parameter("mean.weight" if not spec.actions else "weight").mul_(100)
    return made


def outputs(learner: TRPOAgent, data: Trajectory, theta: Tensor) -> Tensor:
    parameters = dict(learner.policy.named_views(theta))
    return functional_call(learner.policy_net, parameters, (data.observation.flatten(0, 1),))


def log_probs(spec: EnvSpec, policy: Tensor, action: Tensor) -> Tensor:
    if spec.actions:
        return policy.log_softmax(-1).gather(-1, action.flatten()[:, None])[:, 0]
    mean, log_std = policy.chunk(2, -1)
    return torch.distributions.Normal(mean, log_std.exp()).log_prob(action.flatten(0, 1)).sum(-1)


def mean_kl(spec: EnvSpec, before: Tensor, after: Tensor) -> float:
    """Mean over states of KL(before || after), enumerated; Gaussians by torch's own formula."""
    if not spec.actions:
        p, q = (
            torch.distributions.Normal(x.chunk(2, -1)[0], x.chunk(2, -1)[1].exp()) for x in (before, after)
        )
        return float(torch.distributions.kl_divergence(p, q).sum(-1).mean())
    rows = [
        trust_region.categorical_kl(distributions.categorical(p), distributions.categorical(q))
        for p, q in zip(before.tolist(), after.tolist(), strict=True)
    ]
    return sum(rows) / len(rows)


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_the_policy_steps_along_the_natural_gradient(spec: EnvSpec, seed: int) -> None:
    """Of -mean(log pi A), with the Fisher matrix as the mean of outer products of scores over all actions
    (or many of them), damped, and inverted densely."""
    learner = agent(spec, seed, cg_iterations=200, max_kl=1e-4)
    data = played(learner, seed)
    theta = learner.policy.params.detach().clone()
    _, advantage = learner._values_and_advantages(data)
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
    x = theta.clone().requires_grad_()
    loss = -(log_probs(spec, outputs(learner, data, x), data.action) * advantage.flatten()).mean()
    (g,) = torch.autograd.grad(loss, x)
    policy = outputs(learner, data, theta).detach()
    jacobian = torch.autograd.functional.jacobian(lambda y: outputs(learner, data, y), theta)
    fisher = torch.zeros(len(theta), len(theta))
    for j, out in zip(jacobian, policy, strict=True):
        if spec.actions:
            pi = out.softmax(-1)
            scores = torch.eye(4) - pi  # grad log pi(a) with respect to the logits, a row for each action
            inner = (pi[:, None, None] * scores[:, :, None] * scores[:, None, :]).sum(0)
        else:
            inner = torch.cat([torch.exp(-2 * out[2:]), torch.full((2,), 2.0)]).diag()
        fisher += j.T @ inner @ j / len(policy)
    damped = fisher + 0.1 * torch.eye(len(theta))
    direction = -torch.linalg.solve(damped.double(), g.double()).float()
    full = direction * math.sqrt(2e-4 / float(direction @ damped @ direction))
    figures = learner.learn(Batch(data)).read_metrics()
    assert float(figures["gradient_norm"]) == pytest.approx(float(g.norm()), rel=1e-4)
    step = learner.policy.params.detach() - theta
    torch.testing.assert_close(step, float(figures["step_fraction"]) * full, rtol=0.02, atol=2e-4)
    assert float(torch.cosine_similarity(step, full, 0)) > 0.9999


@BOTH
def test_each_step_keeps_the_bound_on_100_rollouts(spec: EnvSpec) -> None:
    """What the agent says of the divergence is what is found from its policies before and after."""
    divergences = []
    for seed in range(50):  # of each kind of action
        learner = agent(spec, seed, max_kl=0.05, value_epochs=1, value_minibatches=1)
        data = played(learner, seed)
        theta = learner.policy.params.detach().clone()
        figures = learner.learn(Batch(data)).read_metrics()
        with torch.no_grad():
            before, after = (
                outputs(learner, data, theta),
                outputs(learner, data, learner.policy.params.detach()),
            )
        kl = mean_kl(spec, before, after)
        assert kl <= 0.05 * (1 + 1e-4)
        assert float(figures["kl"]) == pytest.approx(kl, rel=1e-3, abs=1e-6)
        assert float(figures["loss"]) < 0
        divergences.append(kl)
    assert sum(divergences) / len(divergences) > 0.01, "it does not keep it by hardly moving"


def test_advantages_are_those_written_out() -> None:
    learner = agent(gae_lambda=0.9)
    data = played(learner, seed=1)
    value, advantage = learner._values_and_advantages(data)

    def net(seen: Tensor) -> tuple[None, Tensor]:
        return None, learner.value_net(seen)[:, 0]

    data = dataclasses.replace(data, behaviour={"value": value})
    expected = torch.tensor(oracle.advantages(net, data, learner.config)).T  # type: ignore[arg-type]
    torch.testing.assert_close(advantage, expected, rtol=1e-5, atol=1e-5)
    assert data.truncated.any()


def test_a_large_rollout_goes_through_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for numbers in (2**24, 3 * 5):  # all 24 steps at once, or 5, 5, 5, 5, 4
        monkeypatch.setattr(trpo, "_PASS_NUMBERS", numbers)
        learner = agent()
        figures = learner.learn(Batch(played(learner))).read_metrics()
        found.append((learner.policy.params.detach().clone(), *(float(x) for x in figures.values())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)


def test_curvature_of_every_other_step() -> None:
    learner = agent(curvature_every=2)
    data = played(learner)
    advantage = torch.randn(data.reward.shape, generator=torch.Generator().manual_seed(0))
    product = trpo._Objective(learner, data, advantage).fisher_product()
    learner.config = dataclasses.replace(learner.config, curvature_every=1)
    others = {"observation": data.observation[::2], "action": data.action[::2]}
    half = trpo._Objective(learner, dataclasses.replace(data, **others), advantage[::2]).fisher_product()
    whole = trpo._Objective(learner, data, advantage).fisher_product()
    v = torch.randn(len(learner.policy), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(product(v), half(v))
    assert not torch.allclose(product(v), whole(v), rtol=1e-2)


def test_where_no_step_helps_the_policy_stays_and_counts_one() -> None:
    learner = agent(gae_lambda=1.0, discount=0.0)
    data = played(learner, ends=0.0)
    data.reward.fill_(1.0)
    with torch.no_grad():
        learner.value_net.head.get_parameter("weight").zero_()
    before = learner.policy.params.detach().clone()
    figures = learner.learn(Batch(data)).read_metrics()
    assert figures["step_fraction"] == 0.0
    assert torch.equal(learner.policy.params, before)
    assert (learner.policy.clock, learner.critic.clock) == (1, learner.config.updates(1))


def test_rewards_that_are_not_finite_are_reported_before_anything_changes() -> None:
    learner = agent()
    data = played(learner)
    data.reward[2, 1] = math.nan
    before = learner.policy.params.detach().clone()
    with pytest.raises(NotFinite, match="policy"):
        learner.learn(Batch(data))
    assert torch.equal(learner.policy.params, before)


def test_the_value_net_approaches_the_returns() -> None:
    learner = agent(value_epochs=20, value_learning_rate=1e-2, discount=0.0, gae_lambda=1.0)
    data = played(learner, steps=12, simulators=8)
    data = dataclasses.replace(data, reward=data.observation.sum(-1))
    losses = [float(learner.learn(Batch(data)).read_metrics()["value_loss"]) for _ in range(5)]
    assert losses[-1] < 0.2 * losses[0]


def test_images_have_a_step_too() -> None:
    spec = EnvSpec("image", (4, 84, 84), torch.uint8, actions=3)
    learner = TRPO(steps=4, value_epochs=1, value_minibatches=1).build(Context(spec, Replica, 0))
    g = torch.Generator().manual_seed(0)
    seen = torch.randint(0, 256, (5, 2, 4, 84, 84), generator=g, dtype=torch.uint8)
    none = torch.zeros(4, 2, dtype=torch.bool)
    data = Trajectory(
        seen[:4],
        torch.randint(3, (4, 2), generator=g),
        torch.randn(4, 2, generator=g),
        none,
        none,
        none,
        seen[4],
    )
    with torch.no_grad():
        before = learner.policy_net(seen[:4].flatten(0, 1))
    figures = learner.learn(Batch(data)).read_metrics()
    with torch.no_grad():
        kl = mean_kl(spec, before, learner.policy_net(seen[:4].flatten(0, 1)))
    assert 1e-4 < kl <= 0.01 * (1 + 1e-4)
    assert float(figures["kl"]) == pytest.approx(kl, rel=1e-2)


def of_rank(learner: TRPOAgent, rank: int) -> Trajectory:
    """Every rank's own rollout; nothing is truncated, so that rollouts can be put side by side."""
    data = played(learner, seed=100 + rank, simulators=3, ends=0.0)
    return dataclasses.replace(data, memory=None)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=2)], ids=["all-reduce", "local-sgd"])
def test_replicas_step_together_as_one_on_all_rollouts(size: int, strategy: Any) -> None:
    """The values enter: the first rollout's, because afterwards the nets have seen other minibatches."""

    def learn(member: Any) -> tuple[list[Tensor], Trajectory, dict[str, Any]]:
        replicator = Replicator(strategy, member)
        group = functools.partial(Group, TensorExchange(member, range(size)))
        learner = agent(context=Context(SPEC, replicator.replicate, 3, open_group=group))
        data, path = of_rank(learner, member.rank), []
        for step in range(3):
            figures = learner.learn(Batch(data if step == 0 else of_rank(learner, member.rank + 10 * step)))
            path.append(learner.policy.params.detach().clone())
            if step == 0:
                first = figures.read_metrics()
        return path, data, first

    found = SimulatedFabric(size, seed=1).run([learn] * size)
    for path, _, _ in found:
        for one, other in zip(path, found[0][0], strict=True):
            assert torch.equal(one, other)
    parts = [data for _, data, _ in found]
    names = ("observation", "action", "reward", "terminated", "truncated", "first")
    whole = {name: torch.cat([getattr(p, name) for p in parts], 1) for name in names}
    joined = Trajectory(**whole, last_observation=torch.cat([p.last_observation for p in parts]))
    alone = agent(context=Context(SPEC, Replica, 3))
    figures = alone.learn(Batch(joined)).read_metrics()
    torch.testing.assert_close(found[0][0][0], alone.policy.params.detach(), rtol=2e-3, atol=1e-4)
    for _, _, theirs in found:
        assert float(theirs["kl"]) == pytest.approx(float(figures["kl"]), rel=1e-2)
        assert theirs["step_fraction"] == figures["step_fraction"]


@BOTH
def test_learns_a_bandit(spec: EnvSpec) -> None:
    learner = agent(spec, max_kl=0.05)
    generator = torch.Generator().manual_seed(0)
    observation, ended = torch.ones(32, 3), torch.ones(1, 32, dtype=torch.bool)

    def reward(action: Tensor) -> Tensor:
        return (action == 2).float() if spec.actions else -(action - 0.5).square().sum(-1)

    for _ in range(60):
        action = learner.act(observation, None, ended[0], generator).action
        data = Trajectory(
            observation[None], action[None], reward(action)[None], ended, ~ended, ended, observation
        )
        learner.learn(Batch(data))
    best = learner.act(observation, None, ended[0], generator, greedy=True).action
    assert reward(best).mean() > (0.99 if spec.actions else -0.02)
