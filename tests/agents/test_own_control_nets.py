"""Nets of the user's own for TD3, DDPG and SAC: whole updates as with the agents' own, images, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import murmurate
from murmurate.agents.ddpg import DDPG
from murmurate.agents.sac import SAC
from murmurate.agents.td3 import TD3
from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.replay.interface import Sample
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec

SPEC = EnvSpec(
    "toy", (3,), torch.float32, actions=0, action_shape=(2,), action_low=(-2.0, 0.0), action_high=(2.0, 3.0)
)
IMAGES = dataclasses.replace(SPEC, observation_shape=(3, 12, 12), observation_dtype=torch.uint8)
BATCH = 8
NAME = f"{__name__}:"


class Joined(nn.Module):
    """A critic of flat observations and actions."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
        self.value = nn.Linear(12, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.value(self.layers(torch.cat([observation, action], 1)))[:, 0]


def of_outputs(outputs: int) -> Any:
    layers = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, outputs))
    return SimpleNamespace(policy=layers, critic=Joined(5))


def deterministic(spec: EnvSpec, hidden: Any) -> Any:
    return of_outputs(2)


def gaussian(spec: EnvSpec, hidden: Any) -> Any:
    return of_outputs(4)


class Pixels(nn.Module):
    def __init__(self, outputs: int, actions: int = 0) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, 2)
        self.unused = nn.Linear(1, 1)
        self.out = nn.Linear(100 + actions, outputs)

    def forward(self, observation: Tensor, action: Tensor | None = None) -> Tensor:
        assert observation.dtype == torch.uint8
        seen = self.convolution(observation.float() / 255).relu().flatten(1)
        return self.out(seen if action is None else torch.cat([seen, action], 1))


def pixels(spec: EnvSpec, hidden: Any) -> Any:
    return SimpleNamespace(policy=Pixels(4), critic=Pixels(1, 2))


def shared(spec: EnvSpec, hidden: Any) -> Any:
    made = of_outputs(2)
    made.critic.layers[2] = made.policy[2]
    return made


def lazy(spec: EnvSpec, hidden: Any) -> Any:
    critic = Joined(5)
    critic.value = nn.LazyLinear(1)
    return SimpleNamespace(policy=nn.LazyLinear(2), critic=critic)


ONE = Joined(5)


def one_critic(spec: EnvSpec, hidden: Any) -> Any:
    made = of_outputs(2)
    made.critic = ONE
    return made


class Blind(Joined):
    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return super().forward(observation, torch.zeros_like(action))


def blind_critic(spec: EnvSpec, hidden: Any) -> Any:
    made = of_outputs(2)
    made.critic = Blind(5)
    return made


def without_critic(spec: EnvSpec, hidden: Any) -> Any:
    return nn.Linear(3, 2)


def in_double(name: str, module: nn.Module, make: Any, **options: Any) -> Replica:
    return Replica(name, module.double(), make, **options)


def agent(config: Any, spec: EnvSpec = SPEC, replicate: Any = in_double, **changes: Any) -> Any:
    made = dataclasses.replace(config, batch=BATCH, hidden=(16, 12), **changes)
    return made.build(Context(spec, replicate, 0))


def core(made: Any) -> Any:
    return getattr(made, "core", made)


def sample(seed: int, spec: EnvSpec = SPEC, dtype: torch.dtype = torch.float64) -> Sample:
    g = torch.Generator().manual_seed(seed)

    def observed() -> Tensor:
        shape = (BATCH, *spec.observation_shape)
        if spec.images:
            return torch.randint(256, shape, generator=g, dtype=torch.uint8)
        return torch.randn(shape, generator=g, dtype=dtype)

    low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
    drawn = {
        "weights": torch.rand(BATCH, generator=g),
        "action": low + (high - low) * torch.rand(BATCH, 2, generator=g),
        "reward": torch.randn(BATCH, generator=g),
        "discount": torch.where(torch.rand(BATCH, generator=g) < 0.3, 0.0, 0.9),
    }
    floats = {name: x.to(dtype) for name, x in drawn.items()}
    return Sample(torch.arange(BATCH), observation=observed(), next_observation=observed(), **floats)


def linears(net: nn.Module) -> list[nn.Linear]:
    return [part for part in net.modules() if isinstance(part, nn.Linear)]


@torch.no_grad()
def copy_into(own: Any, net: BatchedMLP) -> None:
    for member, theirs in enumerate(own.nets):
        for layer, weight, bias in zip(linears(theirs), net.weights, net.biases, strict=True):
            layer.weight.copy_(weight[member].T)
            layer.bias.copy_(bias[member, 0])


def assert_same(own: Any, net: BatchedMLP, close: dict[str, float]) -> None:
    for member, theirs in enumerate(own.nets):
        for layer, weight, bias in zip(linears(theirs), net.weights, net.biases, strict=True):
            torch.testing.assert_close(layer.weight, weight[member].T, **close)
            torch.testing.assert_close(layer.bias, bias[member, 0], **close)


@pytest.mark.parametrize(
    ("config", "net"),
    [
        (TD3(polyak=0.1), "deterministic"),
        (TD3(policy_delay=0), "deterministic"),
        (DDPG(polyak=0.1), "deterministic"),
        (SAC(polyak=0.1), "gaussian"),
        (SAC(normalize_observations=True), "gaussian"),
    ],
    ids=["td3", "spo", "ddpg", "sac", "normalised"],
)
def test_updates_are_those_of_the_agent_s_own_nets(config: Any, net: str) -> None:
    # normalised observations are float32
    dtype = torch.float32 if config.normalize_observations else torch.float64
    replicate = Replica if dtype == torch.float32 else in_double
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
    ours, theirs = (agent(config, replicate=replicate, network=name) for name in ("", NAME + net))
    assert core(theirs).critics.members == core(ours).critics.members
    targets = list(getattr(core(ours), "targets", None) or [core(ours).target])
    own_targets = list(getattr(core(theirs), "targets", None) or [core(theirs).target])
    copy_into(core(theirs).policy.net, core(ours).policy.net)
    copy_into(core(theirs).critics, core(ours).critics)
    for own, target in zip(own_targets, targets, strict=True):
        copy_into(own.net, target.net)
    for update in range(1, 7):
        found, expected = (made.learn(Batch(sample(update, dtype=dtype))) for made in (theirs, ours))
        torch.testing.assert_close(found.priorities, expected.priorities, **close)
    assert_same(core(theirs).policy.net, core(ours).policy.net, close)
    assert_same(core(theirs).critics, core(ours).critics, close)
    for own, target in zip(own_targets, targets, strict=True):
        assert_same(own.net, target.net, close)
    first, observation = torch.ones(BATCH, dtype=torch.bool), sample(9, dtype=dtype).observation
    actions = [
        made.act(observation, None, first, torch.Generator().manual_seed(3)).action for made in (ours, theirs)
    ]
    torch.testing.assert_close(*actions, **close)


def test_twin_critics_begin_with_weights_of_their_own() -> None:
    one, other = core(agent(TD3(), network=NAME + "deterministic")).critics.nets
    assert not torch.equal(linears(one)[0].weight, linears(other)[0].weight)


def test_layers_that_draw_weights_in_the_first_call_draw_them_from_the_seed() -> None:
    first, second = (agent(TD3(), network=NAME + "lazy") for _ in range(2))
    assert torch.equal(first.replicas["policy"].params, second.replicas["policy"].params)
    assert torch.equal(first.replicas["critic"].params, second.replicas["critic"].params)
    one, other = (net.value.weight for net in first.critics.nets)
    assert not torch.equal(one, other)


def test_sac_learns_from_images_with_nets_of_one_s_own() -> None:
    made = agent(SAC(critic_rate=1e-2), IMAGES, Replica, network=NAME + "pixels")
    data = sample(1, IMAGES, torch.float32)
    data.discount.zero_()  # the rewards alone, which the critics can learn by heart
    losses = [float(made.learn(Batch(data)).read_metrics()["loss"]) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]
    action = made.act(data.observation, None, torch.ones(BATCH, dtype=torch.bool), torch.Generator()).action
    assert action.shape == (BATCH, 2)
    with pytest.raises(ValueError, match=r"sac reads vectors, .* nets of your own"):
        agent(SAC(), IMAGES)


@pytest.mark.parametrize(
    ("config", "net", "words"),
    [
        (SAC(), "deterministic", r"policy of .* must return \[B, 4\], and .* returns \[2, 2\]"),
        (TD3(), "gaussian", r"policy of .* must return \[B, 2\], and .* returns \[2, 4\]"),
        (TD3(), "shared", "share parameters"),
        (TD3(), "one_critic", "share parameters"),
        (DDPG(), "blind_critic", "ignores the action"),
        (TD3(), "without_critic", "the torch modules policy and critic, and it makes one of type Linear"),
        (TD3(), "nowhere", "nowhere"),
        (TD3(precision="bfloat16"), "deterministic", "with network use float32"),
    ],
)
def test_nets_that_do_not_fit_are_refused(config: Any, net: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        agent(config, network=NAME + net)


FILE = """
from types import SimpleNamespace
import torch
from torch import nn

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(4, 1)

    def forward(self, observation, action):
        return self.value(torch.cat([observation, action], 1))

def make(spec, hidden):
    return SimpleNamespace(policy=nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), critic=Critic())
"""


def test_a_run_with_nets_of_one_s_own_goes_on_and_its_policy_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(FILE)
    ended = murmurate.train(
        "pendulum-sac", agent={"network": "nets.py:make", "batch": 16}, launcher="inline", simulators=2,
        replay={"learning_starts": 32}, random_env_steps=0, updates=4, eval_episodes=1, out="run",
    )  # fmt: skip
    assert ended.summary["updates"] == 4
    ended = murmurate.resume("run", updates=6)
    assert ended.summary["updates"] == 6
    model = murmurate.load("run")
    model.export("policy.pt2")
    program = torch.export.load("policy.pt2").module()
    observation = torch.randn(5, 3)
    torch.testing.assert_close(
        program(observation)[0].detach(),
        torch.from_numpy(model.act(observation.numpy())),
        rtol=1e-5,
        atol=1e-6,
    )
