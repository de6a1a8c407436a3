"""Shapes, streams and initialisation of Q-networks."""

from __future__ import annotations

import pytest
import torch

from murmurate.nets.q_network import DuelingHead, q_network
from murmurate.spec import EnvSpec

VECTOR = EnvSpec("vector", (4,), torch.float32, 3)
FRAMES = EnvSpec("frames", (4, 84, 84), torch.uint8, 6)


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(("spec", "torso"), [(VECTOR, "auto"), (FRAMES, "auto"), (FRAMES, "nature2015")])
def test_a_value_for_each_action(spec, torso, dueling):
    net, again = (q_network(spec, generator=generator(), torso=torso, dueling=dueling) for _ in range(2))
    values = net(torch.zeros(5, *spec.observation_shape, dtype=spec.observation_dtype))
    assert values.shape == (5, spec.actions)
    assert values.dtype == torch.float32
    for one, same in zip(net.parameters(), again.parameters(), strict=True):  # values of zeros are always 0
        assert torch.equal(one, same)


def test_two_streams_by_definition():
    head = DuelingHead(2, 3)
    features = torch.randn(4, 2)
    advantage = head.advantage(features)
    expected = head.value(features) + advantage - advantage.mean(1, keepdim=True)
    assert torch.equal(head(features), expected)
    torch.testing.assert_close(head(features).mean(1, keepdim=True), head.value(features))


def test_what_cannot_be_built_is_told():
    with pytest.raises(ValueError, match="use a2c"):
        q_network(EnvSpec("arm", (4,), torch.float32, 0, (2,)), generator=generator())
    with pytest.raises(ValueError, match="use mlp"):
        q_network(VECTOR, generator=generator(), torso="nature2013")
    with pytest.raises(ValueError, match="no torso called 'resnet'"):
        q_network(FRAMES, generator=generator(), torso="resnet")
