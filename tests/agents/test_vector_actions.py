"""DDPG, TD3 and SAC: whole updates against plain autograd in float64, and what each update may change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import agreeing
from murmurate.agents._noise import UpdateNoise
from murmurate.agents.ddpg import DDPG
from murmurate.agents.sac import SAC
from murmurate.agents.td3 import TD3
from murmurate.nets.control import ActionBounds, limited_log_std, through_limit
from murmurate.replay.interface import Sample
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec

SPEC = EnvSpec(
    "toy", (3,), torch.float32, actions=0, action_shape=(2,), action_low=(-2.0, 0.0), action_high=(2.0, 3.0)
)
BATCH = 8


def in_double(name: str, module: nn.Module, make: Any, **options: Any) -> Replica:
    return Replica(name, module.double(), make, **options)


def agent(config: Any, replicate: Any = Replica, spec: EnvSpec = SPEC) -> Any:
    made = dataclasses.replace(config, batch=BATCH, hidden=(16, 12))
    return made.build(Context(spec, replicate, 0))


def sample(seed: int = 0, dtype: torch.dtype = torch.float32, size: int = BATCH) -> Sample:
    g = torch.Generator().manual_seed(seed)
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    drawn = {
        "weights": torch.rand(size, generator=g),
        "observation": torch.randn(size, 3, generator=g),
        "action": low + (high - low) * torch.rand(size, 2, generator=g),
        "reward": torch.randn(size, generator=g),
        "discount": torch.where(torch.rand(size, generator=g) < 0.3, 0.0, 0.9),
        "next_observation": torch.randn(size, 3, generator=g),
    }
    return Sample(torch.arange(size), **{name: x.to(dtype) for name, x in drawn.items()})


def mlp(net: nn.Module, member: int = 0) -> nn.Sequential:
    """One member as plain layers, with parameters of their own."""
    layers: list[nn.Module] = []
    for weight, bias in zip(net.weights, net.biases, strict=True):
        layer = nn.Linear(*weight.shape[1:]).double()
        layer.weight.data, layer.bias.data = (
            weight[member].detach().T.clone(),
            bias[member, 0].detach().clone(),
        )
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def place(action: Tensor) -> Tensor:
    low, high = torch.tensor(SPEC.action_low).double(), torch.tensor(SPEC.action_high).double()
    return 2 * (action - low) / (high - low) - 1


def follow(targets: list[nn.Module], nets: list[nn.Module], share: float) -> None:
    with torch.no_grad():
        for target, net in zip(targets, nets, strict=True):
            for own, new in zip(target.parameters(), net.parameters(), strict=True):
                own += share * (new - own)


def assert_same(net: nn.Module, plain: list[nn.Sequential]) -> None:
    for member, other in enumerate(plain):
        for ours, theirs in zip(mlp(net, member).parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["ddpg", "td3"])
def test_updates_are_those_of_the_paper_s_algorithm(name: str) -> None:
    """Fujimoto et al. 2018, Algorithm 1, with autograd; DDPG is what is left without its additions."""
    twins, delay = (2, 2) if name == "td3" else (1, 1)
    config = TD3(polyak=0.1, exploration_noise=0.0) if name == "td3" else DDPG(polyak=0.1)
    made = agent(config, in_double)
    policy, q = mlp(made.policy.net), [mlp(made.critics, e) for e in range(twins)]
    target_policy, target_q = mlp(made.policy.net), [mlp(made.critics, e) for e in range(twins)]
    of_policy = torch.optim.Adam(policy.parameters(), lr=3e-4)
    of_critics = torch.optim.Adam([p for net in q for p in net.parameters()], lr=3e-4)
    for t in range(1, 7):
        data = sample(t, torch.float64)
        with torch.no_grad():
            noise = (made._noise.of(t - 1)[0] * (0.2 if name == "td3" else 0)).double()
            following = target_policy(data.next_observation).tanh() + noise.clamp(-0.5, 0.5)
            joined = torch.cat([data.next_observation, following.clamp(-1, 1)], 1)
            y = data.reward + data.discount * torch.stack([net(joined)[:, 0] for net in target_q]).amin(0)
        values = [net(torch.cat([data.observation, place(data.action)], 1))[:, 0] for net in q]
        loss = sum((data.weights * (y - value) ** 2).mean() for value in values)
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()
        if t % delay == 0:
            taken = policy(data.observation).tanh()
            of_policy.zero_grad()
            (-q[0](torch.cat([data.observation, taken], 1)).mean()).backward()
            of_policy.step()
            follow([target_policy, *target_q], [policy, *q], 0.1)
        outcome = made.learn(Batch(data))
        errors = torch.stack([y - value for value in values]).abs().mean(0).detach()
        torch.testing.assert_close(outcome.priorities, errors, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(outcome.read_metrics()["loss"], loss.detach(), rtol=1e-9, atol=1e-11)
    assert_same(made.policy.net, [policy])
    assert_same(made.critics, q)
    assert_same(made.targets[0].net, [target_policy])
    assert_same(made.targets[1].net, target_q)


def test_the_gradient_through_the_limit_of_log_std_is_autograd_s() -> None:
    log_std = torch.tensor([[-30.0, -19.9, 0.0, 1.9, 2.1, 50.0]]).requires_grad_()
    slope = torch.arange(1.0, 7.0)[None]
    limited_log_std(log_std).backward(slope)
    assert torch.equal(through_limit(slope, log_std.detach()), log_std.grad)


def test_the_noise_of_updates_is_of_the_seed_the_rank_and_the_update() -> None:
    def noise(seed: int, rank: int, update: int) -> tuple[float, ...]:
        return tuple(UpdateNoise(seed, rank, (1, 3, 2), torch.device("cpu")).of(update).flatten().tolist())

    each = [(seed, rank, update) for seed in (0, 1) for rank in (0, 1) for update in (0, 1, 64, 65)]
    assert len({noise(*numbers) for numbers in each}) == len(each)
    assert noise(1, 1, 65) == noise(1, 1, 65)


def test_sac_s_updates_are_those_of_the_paper_s_algorithm() -> None:
    made = agent(SAC(polyak=0.1, temperature=0.3, temperature_rate=1e-2), in_double)
    single = made.core._noise.of
    made.core._noise.of = lambda update: single(update).double() / 2
    with torch.no_grad():
        made.core.policy.net.biases[-1].view(-1)[-1] = 3.0  # of a log_std, whose limit is 2
    policy, q = mlp(made.core.policy.net), [mlp(made.core.critics, e) for e in range(2)]
    target_q = [mlp(made.core.critics, e) for e in range(2)]
    log_alpha = torch.tensor(0.3).log().double().requires_grad_()
    of_policy, of_alpha = (
        torch.optim.Adam(policy.parameters(), lr=3e-4),
        torch.optim.Adam([log_alpha], lr=1e-2),
    )
    of_critics = torch.optim.Adam([p for net in q for p in net.parameters()], lr=3e-4)

    def draw(observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = policy(observation).chunk(2, 1)
        base = Normal(mean, log_std.clamp(-20, 2).exp())
        u = base.mean + base.stddev * noise
        return u.tanh(), (base.log_prob(u) - torch.log1p(-(u.tanh() ** 2))).sum(1)

    for t in range(1, 6):
        data, noise = sample(t, torch.float64), made.core._noise.of(t - 1)
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            following, log_following = draw(data.next_observation, noise[0])
            joined = torch.cat([data.next_observation, following], 1)
            least = torch.stack([net(joined)[:, 0] for net in target_q]).amin(0)
            y = data.reward + data.discount * (least - alpha * log_following)
        joined = torch.cat([data.observation, place(data.action)], 1)
        loss = sum((data.weights * (y - net(joined)[:, 0]) ** 2).mean() for net in q)
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()
        taken, log_taken = draw(data.observation, noise[1])
        least = torch.stack([net(torch.cat([data.observation, taken], 1))[:, 0] for net in q]).amin(0)
        of_policy.zero_grad()
        (alpha * log_taken - least).mean().backward()
        of_policy.step()
        of_alpha.zero_grad()
        (-log_alpha * (log_taken.detach() - 2.0).mean()).backward()
        of_alpha.step()
        follow(target_q, q, 0.1)
        made.learn(Batch(data))
    assert_same(made.core.policy.net, [policy])
    assert_same(made.core.critics, q)
    assert_same(made.core.target.net, target_q)
    torch.testing.assert_close(made.replicas["temperature"].params.detach()[0], log_alpha.detach())


def vectors(made: Any) -> dict[str, Tensor]:
    return {name: replica.params.detach().clone() for name, replica in made.replicas.items()}


def test_the_delayed_policy_and_its_target_wait() -> None:
    made = agent(TD3(policy_delay=3, target_every=3))
    for update in range(1, 7):
        before, target = vectors(made), made.targets[0].net.weights[0].clone()
        metrics = made.learn(Batch(sample(update))).read_metrics()
        assert ("policy_value" in metrics) == (update >= 3), "not known before the policy's first update"
        after, due = vectors(made), update % 3 == 0
        assert not torch.equal(before["critic"], after["critic"])
        assert torch.equal(before["policy"], after["policy"]) != due
        assert torch.equal(target, made.targets[0].net.weights[0]) != due


def in_rounds(period: int) -> Any:
    """A replica whose rounds are of ``period`` updates, as under local SGD."""

    def replicate(name: str, module: nn.Module, make: Any, **options: Any) -> Replica:
        replica = Replica(name, module, make, **options)
        replica.exchange = agreeing.every(period)
        return replica

    return replicate


def test_targets_move_when_the_rounds_of_critics_and_policy_have_both_ended() -> None:
    """After 4 updates the critics' round has ended, and the policy, updated twice, is within one."""
    made = agent(TD3(policy_delay=2, target_every=1), replicate=in_rounds(4))
    moved = []
    for update in range(1, 17):
        before = made.targets[0].net.weights[0].clone()
        made.learn(Batch(sample(update)))
        if not torch.equal(before, made.targets[0].net.weights[0]):
            moved.append(update)
    assert moved == [8, 16]


def test_spo_s_policy_learns_at_the_end_of_a_round_from_all_of_its_batches() -> None:
    """Zhang 2022, Algorithm 8: H updates of the critics, then H of the policy; targets move every F
    rounds."""
    made = agent(TD3(policy_delay=0, target_every=6, polyak=1.0), in_rounds(3))
    clocks, targets = [], []
    for update in range(1, 13):
        target = made.targets[1].net.weights[0].clone()
        made.learn(Batch(sample(update)))
        clocks.append(made.replicas["policy"].clock)
        targets.append(not torch.equal(target, made.targets[1].net.weights[0]))
    assert clocks == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12]
    assert [update for update, moved in enumerate(targets, 1) if moved] == [6, 12]


def test_the_policy_of_a_round_follows_the_critics_of_its_end() -> None:
    """The same updates by hand: critics first, then the policy with these critics."""
    made, other = (agent(TD3(policy_delay=0, target_every=100), in_rounds(2)) for _ in range(2))
    memory = sample()  # a source may make each batch in the memory of the one before
    for update in (1, 2):
        memory.observation.copy_(sample(update).observation)
        made.learn(Batch(dataclasses.replace(sample(update), observation=memory.observation)))
    other._delay = 10**9  # critics alone
    for update in (1, 2):
        other.learn(Batch(sample(update)))
    with torch.no_grad():
        for update in (1, 2):
            other._update_policy(sample(update).observation)
    assert torch.equal(made.replicas["policy"].params, other.replicas["policy"].params)


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize(
    "config", [TD3(policy_delay=0), TD3(), DDPG(), SAC()], ids=["spo", "td3", "ddpg", "sac"]
)
def test_saved_in_the_middle_of_a_round_it_goes_on_as_if_uninterrupted(config: Any, normalize: bool) -> None:
    config = dataclasses.replace(config, normalize_observations=normalize)
    made = agent(config, in_rounds(4))
    for update in range(1, 7):
        made.learn(Batch(sample(update)))
    restored = agent(config, in_rounds(4))
    for name, replica in made.replicas.items():
        restored.replicas[name].load(replica.state())
    restored.load(made.state())
    for update in range(7, 13):
        for each in (made, restored):
            each.learn(Batch(sample(update)))
    for name, vector in vectors(made).items():
        assert torch.equal(vector, restored.replicas[name].params), name


@pytest.mark.parametrize("config", [TD3(), SAC(), DDPG()], ids=["td3", "sac", "ddpg"])
def test_actions_lie_between_their_bounds_and_are_greedy_without_noise(config: Any) -> None:
    made, generator = agent(config), torch.Generator().manual_seed(0)
    observation, first = 5 * torch.randn(200, 3, generator=generator), torch.ones(200, dtype=torch.bool)
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    explored = made.act(observation, None, first, generator).action
    greedy = made.act(observation, None, first, generator, greedy=True).action
    again = made.act(observation, None, first, generator, greedy=True).action
    for action in (explored, greedy):
        assert ((action >= low) & (action <= high)).all()
    assert torch.equal(greedy, again)
    assert not torch.equal(explored, greedy)


def test_places_of_actions_are_found_again() -> None:
    bounds = ActionBounds(SPEC)
    action = sample(size=50).action
    torch.testing.assert_close(bounds.to_world(bounds.to_scaled(action)), action)
    assert bounds.to_scaled(torch.tensor([[-2.0, 3.0]])).tolist() == [[-1.0, 1.0]]


def test_a_component_with_a_single_value_is_no_number_less() -> None:
    fixed = ActionBounds(dataclasses.replace(SPEC, action_low=(-1.0, 2.0), action_high=(3.0, 2.0)))
    scaled = fixed.to_scaled(torch.tensor([[3.0, 2.0], [1.0, 2.0]]))
    assert scaled.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert fixed.to_world(scaled).tolist() == [[3.0, 2.0], [1.0, 2.0]]
    fixed = ActionBounds(dataclasses.replace(SPEC, action_low=(-1.0, 1.0), action_high=(1.0, 1.0)))
    assert fixed.to_world(scaled)[:, 1].tolist() == [1.0, 1.0]


def test_a_constant_temperature_has_no_replica() -> None:
    made = agent(SAC(temperature_rate=0.0, temperature=0.2))
    made.learn(Batch(sample()))
    assert set(made.replicas) == {"policy", "critic"}
    assert made.learn(Batch(sample(1))).read_metrics()["temperature"].item() == pytest.approx(0.2)


def test_normalised_observations_are_those_of_the_batches() -> None:
    made = agent(SAC(normalize_observations=True))
    seen = []
    for update in range(5):
        data = sample(update)
        data.observation = 100 + 7 * data.observation
        seen.append(data.observation)
        made.learn(Batch(data))
    moments, together = made.core.policy.normalizer.moments, torch.cat(seen).double()
    torch.testing.assert_close(moments.mean, together.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moments.variance, together.var(0, unbiased=False), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("config", [TD3(), SAC(), DDPG()], ids=["td3", "sac", "ddpg"])
def test_what_it_cannot_learn_is_refused_with_another_agent(config: Any) -> None:
    discrete = EnvSpec("chess", (3,), torch.float32, actions=4)
    with pytest.raises(ValueError, match="dqn"):
        agent(config, spec=discrete)
    for high, low in ((float("inf"), -1.0), (3.4e38, -3.4e38)):
        endless = dataclasses.replace(SPEC, action_high=(high, 1.0), action_low=(low, -1.0))
        with pytest.raises(
            ValueError, match=r"function that makes it \(--env FILE.py:NAME.*TransformAction.*\(2,\)"
        ):
            agent(config, spec=endless)
    images = dataclasses.replace(SPEC, observation_shape=(3, 8, 8), observation_dtype=torch.uint8)
    with pytest.raises(ValueError, match="d4pg"):
        agent(config, spec=images)
