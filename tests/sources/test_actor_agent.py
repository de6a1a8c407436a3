"""What an actor's agent receives of its learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from murmurate.agents.impala import IMPALA
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.sources.actor_agent import ActorAgent, ActorSettings
from murmurate.sources.actor_processes import ActorPlan, ActorProcesses
from murmurate.sources.trajectory_ring import TrajectoryRing, TrajectoryShape
from murmurate.spec import EnvSpec
from murmurate.worlds.registry import world

SPEC = EnvSpec("toy", (3,), torch.float32, actions=4)


class Scaled(nn.Module):
    """A net with statistics of what it has seen, and random features that are not learned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.features = nn.Linear(3, 2).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@dataclass(frozen=True)
class Config(LearnerConfig):
    """Of an agent that only has replicas."""

    name = "scaled"
    summary = "for this test"

    @property
    def requires(self) -> Any:
        return IMPALA().requires

    def build(self, context: Context) -> Any:
        return Scaling(context)


class Scaling:
    acting = ("policy",)

    def __init__(self, context: Context) -> None:
        def optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1)

        self.replicas = {name: context.replicate(name, Scaled(), optimizer) for name in ("policy", "value")}

    def assign_simulators(self, first: int, total: int) -> None:
        self.assigned = first, total


def test_an_actor_has_the_newest_vectors_and_what_is_not_learned_of_the_acting_replicas() -> None:
    learner = Scaling(Context(SPEC, Replica, 0))
    plan = ActorPlan(world("cartpole"), Config(), 2, 6, rank=1, replicas=3, queue=1)
    shape = TrajectoryShape(SPEC, 2, 3, 0, {})
    processes = ActorProcesses(
        plan, learner, "unused", lambda memory_file, _: TrajectoryRing(memory_file, shape, 1), seed=0
    )
    settings = ActorSettings(
        world=plan.world,
        agent=plan.agent,
        simulators=3,
        first_simulator=3,
        global_first_simulator=9,
        total_simulators=18,
        seed=0,
        incarnation="0 0",
        random_env_steps=0,
        queue=1,
        parameters=(processes._memory_file.descriptor, len(processes.parameters)),
        ring=-1,
    )
    acting = ActorAgent(settings, SPEC)
    agent: Any = acting.agent
    assert agent.assigned == (9, 18)
    untouched = agent.replicas["value"].params.detach().clone()
    for version in (1, 4):
        net = learner.replicas["policy"].module
        with torch.no_grad():
            learner.replicas["policy"].params.normal_()
            net.mean.uniform_()
        processes.publish(version)
        acting.refresh()
        assert acting.version == version
        assert agent.replicas["policy"].clock == version - 1
        own = agent.replicas["policy"].module
        assert torch.equal(own.linear.weight, net.linear.weight)
        assert torch.equal(own.features.weight, net.features.weight)
        assert own.mean.dtype == torch.float64
        torch.testing.assert_close(own.mean, net.mean, rtol=1e-6, atol=0)
    assert torch.equal(agent.replicas["value"].params, untouched), "it does not act"
    processes.close()
