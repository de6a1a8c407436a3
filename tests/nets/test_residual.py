"""The residual torso of IMPALA, against its figure written out, and its sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from murmurate.agents.impala import IMPALA
from murmurate.nets.actor_critic import actor_critic
from murmurate.nets.residual import ResidualTorso
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec

FRAMES = EnvSpec("frames", (4, 84, 84), torch.uint8, actions=6)


def seen(batch: int, shape: tuple[int, ...] = (4, 84, 84)) -> Tensor:
    return torch.randint(0, 256, (batch, *shape), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def written_out(torso: ResidualTorso, observation: Tensor) -> Tensor:
    """Figure 3 from below: [conv 3x3, max 3x3 / 2, 2 x (relu, conv, relu, conv, +)] x 3, relu, FC, relu."""
    parameters = iter(torso.parameters())

    def convolved(x: Tensor) -> Tensor:
        return F.conv2d(x, next(parameters), next(parameters), padding=1)

    x = observation.double() / 255
    for _ in range(3):
        x = F.max_pool2d(convolved(x), 3, stride=2, padding=1)
        for _ in range(2):
            x = x + convolved(F.relu(convolved(F.relu(x))))
    return F.relu(F.linear(F.relu(x).flatten(1), next(parameters), next(parameters)))


@pytest.mark.parametrize("shape", [(4, 84, 84), (3, 30, 45)])
def test_it_is_the_net_of_the_figure(shape: tuple[int, ...]) -> None:
    torso = ResidualTorso(shape).double()
    observation = seen(3, shape)
    torch.testing.assert_close(torso(observation), written_out(torso, observation))


def test_its_sizes_are_the_papers() -> None:
    """15 convolutions; 1.6 million parameters with an LSTM of 256, for 72 x 96 pixels in colour, of which
    about 0.1 million read an instruction, the last action and the last reward, which ours does not."""
    torso = ResidualTorso((4, 84, 84))
    assert torso.linear.in_features == 32 * 11 * 11
    assert sum(p.dim() == 4 for p in torso.parameters()) == 15
    lab = EnvSpec("lab", (3, 72, 96), torch.uint8, actions=9)
    net = actor_critic(lab, torso="impala2018", recurrent=256, generator=torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in net.parameters()) == 1_511_498


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_agent_acts_with_it(precision: str) -> None:
    agent = IMPALA(torso="impala2018", precision=precision).build(Context(FRAMES, Replica, 0))
    first = torch.zeros(2, dtype=torch.bool)
    chosen = agent.act(seen(2), None, first, torch.Generator().manual_seed(0))
    assert chosen.behaviour["log_probability"].isfinite().all()


def test_what_it_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="reads uint8 images"):
        IMPALA(torso="impala2018").build(Context(EnvSpec("v", (4,), torch.float32, 2), Replica, 0))
    with pytest.raises(ValueError, match="must be uint8"):
        ResidualTorso((4, 84, 84))(seen(1, (4, 80, 84)))
