"""What every actor process has: its settings, an agent that acts, and the newest published parameters.

``ActorProcesses`` starts the process and sends its settings over stdin; the process exits when its learner
does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from murmurate.agents.interface import Agent
from murmurate.errors import RunFailed
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.nets.precision import native_bfloat16
from murmurate.replica.state_dict import fixed_tensors
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.sources.polling import LONGEST_SECONDS, settings_of_learner, use_batch_scheduling
from murmurate.sources.shared_ring import ActorFailure, SharedParameters
from murmurate.spec import EnvSpec
from murmurate.worlds.interface import SimulatorWorld


@dataclass(frozen=True)
class ActorSettings:
    """The settings of one actor process.

    first_simulator: index of the actor's first simulator among the learner's simulators.
    global_first_simulator: the same, among the ``total_simulators`` of all replicas. incarnation: identifies
    this start of the process; each start has its own random seeds. starts_before: number of earlier starts of
    this actor in this run. random_env_steps, queue, poll_seconds: see ``ActorPlan``; random_env_steps is this
    actor's share. parameters: (file descriptor, number of scalars) of the ``SharedParameters``. ring: file
    descriptor of the ring through which the actor sends.
    """

    world: SimulatorWorld
    agent: Any  # a LearnerConfig
    simulators: int
    first_simulator: int
    global_first_simulator: int
    total_simulators: int
    seed: int
    incarnation: str
    random_env_steps: int
    queue: int
    parameters: tuple[int, int]
    ring: int
    starts_before: int = 0
    poll_seconds: float = LONGEST_SECONDS


class ActorAgent:
    """An agent that acts with the newest published parameters.

    Attributes:
        agent: the agent, on the CPU. version: version of its parameters; 0 before the first ``refresh``.
    """

    def __init__(self, settings: ActorSettings, spec: EnvSpec) -> None:
        config = settings.agent
        if getattr(config, "precision", None) == "bfloat16" and not native_bfloat16(torch.device("cpu")):
            # unlike the learner's device, this processor has no native bfloat16
            config = dataclasses.replace(config, precision="float32")
        self.agent = cast(Agent, config.build(Context(spec, _acting_replica, settings.seed)))
        self.agent.assign_simulators(settings.global_first_simulator, settings.total_simulators)
        descriptor, count = settings.parameters
        self._parameters = SharedParameters(SharedMemoryFile(descriptor), count)
        self.version = 0

    def refresh(self) -> None:
        """Load the newest parameters if the version has changed."""
        if self._parameters.version == self.version:
            return
        tensors = published_tensors(self.agent)
        vector = torch.empty(sum(x.numel() for x in tensors))
        self.version = self._parameters.read(vector)
        with torch.no_grad():
            for x, part in zip(tensors, torch.split(vector, [x.numel() for x in tensors]), strict=True):
                x.copy_(part.view(x.shape))
        for name in self.agent.acting:
            self.agent.replicas[name].reload()
            self.agent.replicas[name].clock = self.version - 1  # versions begin at 1, updates at 0


def published_tensors(agent: Agent) -> list[Tensor]:
    """The tensors that actors need from the learner's agent: the vectors of its acting replicas, their frozen
    parameters, which an actor draws from a seed of its own, and buffers such as statistics of observations.
    """
    replicas = [agent.replicas[name] for name in agent.acting]
    fixed = [x for replica in replicas for x in fixed_tensors(replica).values() if x.is_floating_point()]
    return [replica.params for replica in replicas] + fixed


def _acting_replica(name: str, module: nn.Module, make_optimizer: Any, **options: Any) -> Replica:
    """A replica that is never updated. Creating an optimizer would make torch import its compiler, which
    takes as long as importing torch."""
    return Replica(name, module, lambda groups: cast(Any, _NoOptimizer(groups)), **options)


class _NoOptimizer:
    def __init__(self, groups: list[Any]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0} for _ in groups]


def run_actor(run: Callable[[ActorSettings], None]) -> None:
    """Set up an actor process, and call ``run`` with the settings that it reads from stdin.

    If ``run`` raises RunFailed, as an environment that fails again and again does, the learner is told, and
    ends the run with this error. After any other error it starts the actor again.
    """
    settings: ActorSettings = settings_of_learner()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    use_batch_scheduling()
    try:
        run(settings)
    except RunFailed as failure:
        ActorFailure(SharedMemoryFile(settings.ring)).write(str(failure))
        raise
