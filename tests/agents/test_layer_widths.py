"""``hidden``: one number is the width of two layers, several are the widths of that many."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from murmurate.agents.a2c import A2C
from murmurate.agents.arm import ARM
from murmurate.agents.d4pg import D4PG
from murmurate.agents.ddpg import DDPG
from murmurate.agents.dqn import DQN
from murmurate.agents.impala import IMPALA
from murmurate.agents.ppo import PPO
from murmurate.agents.sac import SAC
from murmurate.agents.td3 import TD3
from murmurate.agents.trpo import TRPO
from murmurate.cli.options import change
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec

DISCRETE = EnvSpec("discrete", (9,), torch.float32, actions=2)
VECTOR = EnvSpec(
    "vector", (9,), torch.float32, actions=0, action_shape=(1,), action_low=(-1.0,), action_high=(1.0,)
)
CASES = [(kind(), DISCRETE) for kind in (A2C, ARM, DQN, IMPALA, PPO, TRPO)]
CASES += [(kind(), VECTOR) for kind in (D4PG, DDPG, SAC, TD3)]


@pytest.mark.parametrize(("config", "spec"), CASES, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize(
    ("hidden", "layers"), [((7, 5, 3), {(7, 5), (5, 3)}), (6, {(6, 6)}), ((8,), set())], ids=str
)
def test_nets_have_these_layers(config: Any, spec: EnvSpec, hidden: Any, layers: set[Any]) -> None:
    learner = dataclasses.replace(config, hidden=hidden).build(Context(spec, Replica, 0))
    parameters = [p for replica in learner.replicas.values() for p in replica.module.parameters()]
    shapes = {tuple(sorted(p.shape[-2:], reverse=True)) for p in parameters if p.dim() > 1}
    # not those of the first layers, of the last ones, and of biases
    assert {shape for shape in shapes if shape[0] < 9 and shape[1] > 2} == layers


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["32"], 32),
        (["1e2"], 100),
        (["1_000"], 1000),
        (["32,16"], (32, 16)),
        (["32", "16"], (32, 16)),
        (["32,"], (32,)),
    ],
)
def test_the_command_line_takes_one_or_several(words: list[str], hidden: Any) -> None:
    run = change(recipe("cartpole-a2c"), ["--agent.hidden", *words], "murmurate train cartpole-a2c")
    assert run.learner.hidden == hidden
