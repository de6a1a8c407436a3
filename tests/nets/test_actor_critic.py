"""The net for a world: sizes, gains, dtypes, and what unroll promises."""

import math

import pytest
import torch

from murmurate.nets.actor_critic import ActorCritic, actor_critic
from murmurate.nets.conv import ConvTorso
from murmurate.nets.mlp import MLP
from murmurate.spec import EnvSpec

PONG = EnvSpec("pong", (4, 84, 84), torch.uint8, actions=6)
CARTPOLE = EnvSpec("cartpole", (4,), torch.float32, actions=2)
CHEETAH = EnvSpec("half-cheetah", (17,), torch.float64, actions=0, action_shape=(6,))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def observations(spec, *batch, seed=0):
    if spec.observation_dtype == torch.uint8:
        shape = (*batch, *spec.observation_shape)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(seed))
    x = torch.randn(*batch, *spec.observation_shape, generator=generator(seed))
    return x.to(spec.observation_dtype)


@pytest.mark.parametrize(
    ("spec", "options", "parameters", "width"),
    [
        (PONG, {}, 676_144 + 257 * 6 + 257, 6),
        (PONG, {"torso": "nature2015"}, 1_684_128 + 513 * 6 + 513, 6),
        # LSTM: 4 * 32 * (256 + 32 + 2)
        (PONG, {"recurrent": 32}, 676_144 + 37_120 + 33 * 6 + 33, 6),
        # two trunks of 5*64 + 65*64
        (CARTPOLE, {}, 2 * (320 + 4_160) + 65 * 2 + 65, 2),
        (CARTPOLE, {"hidden": (8,)}, 2 * 40 + 9 * 2 + 9, 2),
        # one trunk, as the LSTM joins them: 4 * 16 * (64 + 16 + 2)
        (CARTPOLE, {"recurrent": 16}, 320 + 4_160 + 5_248 + 17 * 2 + 17, 2),
        # mean and log_std
        (CHEETAH, {}, 2 * (18 * 64 + 4_160) + 65 * 6 + 6 + 65, 12),
    ],
)
def test_parameter_counts_and_output_shapes(spec, options, parameters, width):
    net = actor_critic(spec, generator=generator(), **options)
    assert sum(p.numel() for p in net.parameters()) == parameters
    x, first = observations(spec, 3, 5), torch.zeros(3, 5, dtype=torch.bool)
    memory = net.initial_memory(5)
    policy, value, after = net.unroll(x, memory, first)
    assert policy.shape == (3, 5, width)
    assert value.shape == (3, 5)
    assert policy.dtype == value.dtype == torch.float32
    if "recurrent" in options:
        assert memory.shape == after.shape == (5, 2 * options["recurrent"])
        with pytest.raises(ValueError, match="unroll"):
            net(x[0])
    else:
        assert memory is None
        assert after is None
        policy_0, value_0 = net(x[0])
        torch.testing.assert_close((policy_0, value_0), (policy[0], value[0]), rtol=1e-4, atol=1e-5)


def test_defaults_follow_the_observation():
    assert isinstance(actor_critic(PONG, generator=generator()).torso, ConvTorso)
    assert isinstance(actor_critic(CARTPOLE, generator=generator()).torso, MLP)
    assert isinstance(actor_critic(PONG, generator=generator(), torso="mlp").torso, MLP)


@pytest.mark.parametrize("options", [{}, {"recurrent": 16}])
def test_gains(options):
    net = actor_critic(CARTPOLE, generator=generator(), **options)

    def gain(weight):
        return torch.linalg.svdvals(weight.detach().flatten(1)).tolist()

    for trunk in (net.torso, net.value_torso) if net.value_torso is not None else (net.torso,):
        for layer in trunk.layers:
            assert gain(layer.weight) == pytest.approx([math.sqrt(2)] * len(gain(layer.weight)), rel=1e-5)
    assert gain(net.policy_head.weight) == pytest.approx([0.01, 0.01], rel=1e-4)
    assert gain(net.value_head.weight) == pytest.approx([1.0], rel=1e-5)
    for name, parameter in net.named_parameters():
        if "bias" in name:
            assert parameter.abs().max() == 0


@pytest.mark.parametrize("spec", [PONG, CARTPOLE, CHEETAH])
def test_the_generator_decides_and_the_global_one_is_left_alone(spec):
    state = torch.get_rng_state()
    same = [actor_critic(spec, generator=generator(3)) for _ in range(2)]
    other = actor_critic(spec, generator=generator(4))
    assert torch.equal(torch.get_rng_state(), state)
    for (name, p), q, r in zip(
        same[0].named_parameters(), same[1].parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, q)
        assert torch.equal(p, r) == (not name.endswith("weight"))


def test_trunks_of_an_mlp_are_separate():
    net = actor_critic(CARTPOLE, generator=generator())
    net(observations(CARTPOLE, 3))[1].sum().backward()
    assert all(p.grad is None for p in (*net.torso.parameters(), *net.policy_head.parameters()))
    assert all(p.grad is not None for p in (*net.value_torso.parameters(), *net.value_head.parameters()))


def test_gaussian_parameters_are_mean_and_log_std():
    net = actor_critic(CHEETAH, generator=generator())
    with torch.no_grad():
        net.policy_head.log_std.copy_(torch.arange(6.0))
    mean, log_std = net(observations(CHEETAH, 3))[0].chunk(2, -1)
    assert torch.equal(log_std, torch.arange(6.0).expand(3, 6))
    features = net.torso(observations(CHEETAH, 3))
    torch.testing.assert_close(mean, features @ net.policy_head.mean.weight.T)
    log_std.sum().backward()
    assert net.policy_head.log_std.grad.tolist() == [3.0] * 6


def test_float32_heads_on_a_bfloat16_torso():
    """2% of the values' scale; the heads add nothing to what the torso rounds."""
    net = actor_critic(PONG, generator=generator())
    x = observations(PONG, 16)
    with torch.no_grad():
        _, exact = net(x)
        net.torso.to(torch.bfloat16)
        policy, value = net(x)
    assert policy.dtype == value.dtype == torch.float32
    assert 0 < (value - exact).norm() / exact.norm() < 0.02
    assert not torch.equal(value, value.to(torch.bfloat16).float())

    policy, value = net(x)
    (policy.sum() + value.sum()).backward()
    assert net.value_head.weight.grad.dtype == torch.float32
    assert next(net.torso.parameters()).grad.dtype == torch.bfloat16


@pytest.mark.parametrize("spec", [CARTPOLE, CHEETAH])
@pytest.mark.parametrize("recurrent", [0, 8])
def test_heads_answer_in_float32_even_when_all_is_bfloat16(spec, recurrent):
    net = actor_critic(spec, generator=generator(), recurrent=recurrent).to(torch.bfloat16)
    memory = net.initial_memory(3)
    policy, value, after = net.unroll(observations(spec, 2, 3), memory, torch.ones(2, 3, dtype=torch.bool))
    assert policy.dtype == value.dtype == torch.float32
    assert after is None or after.dtype == memory.dtype == torch.float32


def test_recurrent_unroll_equals_steps_and_resets_at_first():
    net = actor_critic(CARTPOLE, generator=generator(), recurrent=8)
    x = observations(CARTPOLE, 6, 3)
    first = torch.rand(6, 3, generator=generator(5)) < 0.3
    first[3] = True
    memory = torch.randn(3, 16, generator=generator(6))
    policy, value, after = net.unroll(x, memory, first)
    state = memory
    for t in range(6):
        p, v, state = net.unroll(x[t : t + 1], state, first[t : t + 1])
        torch.testing.assert_close((p[0], v[0]), (policy[t], value[t]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, after, rtol=1e-5, atol=1e-6)
    _, alone, _ = net.unroll(x[3:], net.initial_memory(3), first[3:])
    torch.testing.assert_close(alone, value[3:], rtol=1e-5, atol=1e-6)
    _, remembered, _ = net.unroll(x[:1], 2 * memory, torch.zeros(1, 3, dtype=torch.bool))
    _, forgotten, _ = net.unroll(x[:1], 2 * memory, torch.ones(1, 3, dtype=torch.bool))
    assert (remembered - forgotten).abs().min() > 1e-4


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="use mlp"):
        actor_critic(CARTPOLE, generator=generator(), torso="nature2013")
    with pytest.raises(ValueError, match="no torso called 'resnet'"):
        actor_critic(CARTPOLE, generator=generator(), torso="resnet")
    net = actor_critic(CARTPOLE, generator=generator(), recurrent=4)
    x, first = observations(CARTPOLE, 2, 3), torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="initial_memory"):
        net.unroll(x, None, first)
    with pytest.raises(ValueError, match="do not match"):
        net.unroll(x, net.initial_memory(3), first[:1])
    with pytest.raises(ValueError, match="has one torso"):
        ActorCritic(net.torso, net.core, net.policy_head, net.value_head, MLP((4, 4)))
