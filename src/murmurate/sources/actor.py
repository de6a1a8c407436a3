"""An actor: a process that acts with the newest published parameters, and sends its steps to its learner.

Ape-X (Horgan et al. 2018, Algorithm 1): each simulator has its own epsilon, and the initial priority of a
step is computed here, from action values that acting needs anyway. ``ActorSource`` starts the process and
sends its settings over stdin; the process exits when its learner does.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from murmurate.agents.interface import Action, Agent
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.sources.shared_ring import (
    ActorRing,
    ActorStep,
    Backoff,
    SharedParameters,
    use_batch_scheduling,
)
from murmurate.sources.steps import random_actions, steps_of
from murmurate.spec import derive_generator, derive_seed, native_bfloat16
from murmurate.worlds.interface import Simulators, SimulatorWorld


@dataclass(frozen=True)
class ActorSettings:
    """The settings of one actor process.

    first_simulator: its index among the learner's simulators. global_first_simulator: its index among the
    ``total_simulators`` of all replicas. incarnation: identifies this start of the process;
    each start has its own random seeds. parameters: file descriptor and number of the shared parameters.
    ring: file descriptor.
    """

    world: SimulatorWorld
    agent: LearnerConfig
    simulators: int
    first_simulator: int
    global_first_simulator: int
    total_simulators: int
    seed: int
    incarnation: str
    random_env_steps: int
    parameters: tuple[int, int]
    ring: int


class ActorLoop:
    """The actor's loop: refresh the parameters, act, step, send."""

    def __init__(self, settings: ActorSettings) -> None:
        self.settings = settings
        self._simulators: Simulators = settings.world.open(
            settings.simulators, training=True, first=settings.first_simulator
        )
        spec = self._simulators.spec
        config: Any = settings.agent
        if getattr(config, "precision", None) == "bfloat16" and not native_bfloat16(torch.device("cpu")):
            # unlike the learner's device, this processor has no native bfloat16
            config = dataclasses.replace(config, precision="float32")
        context = Context(spec, _acting_replica, settings.seed)
        self._spec, self._agent = spec, cast(Agent, config.build(context))
        self._agent.assign_simulators(settings.global_first_simulator, settings.total_simulators)
        descriptor, count = settings.parameters
        self._parameters = SharedParameters(SharedMemoryFile(descriptor), count)
        behaviour = config.requires.behaviour
        self._ring = ActorRing(SharedMemoryFile(settings.ring), spec, settings.simulators, behaviour)
        self._generator = derive_generator(
            settings.seed, f"actions {settings.incarnation}", settings.global_first_simulator
        )
        self._version = 0
        self._backoff = Backoff()

    def run(self) -> None:
        settings = self.settings
        step = self._simulators.reset(derive_seed(settings.seed, f"games {settings.incarnation}"))
        memory = self._agent.initial_memory(settings.simulators)
        first = torch.ones(settings.simulators, dtype=torch.bool)
        pending: ActorStep | None = None
        played = 0
        while True:
            self._refresh()
            observation = step.observation
            action = self._agent.act(observation, memory, first, self._generator)
            if played < settings.random_env_steps:
                action = self._with_random_actions(action)
            played += settings.simulators
            memory, version = action.memory, self._version
            if pending is not None:  # the value of its next observation is only known now
                self._send(pending, action.greedy_value)
            self._simulators.send(action.action)
            step = self._simulators.receive()
            first = step.terminated | step.truncated
            steps = steps_of(observation, action, step)._replace(action_value=action.action_value)
            pending = ActorStep(steps, list(step.episodes), version, len(step.restarts))
            for message in step.restarts:
                print(message, file=sys.stderr, flush=True)

    def _with_random_actions(self, action: Action) -> Action:
        random = random_actions(self._spec, self.settings.simulators, self._generator)
        return action._replace(action=random, action_value=None)

    def _send(self, record: ActorStep, next_value: Tensor | None) -> None:
        steps = record.steps
        if steps.action_value is None or next_value is None:
            steps = steps._replace(action_value=None, next_value=None)
        else:
            if steps.truncated.any():  # ``next_value`` is then of the next episode's first observation
                next_value = next_value.clone()
                next_value[steps.truncated] = self._value(steps.next_observation[steps.truncated])
            steps = steps._replace(next_value=next_value)
        while not self._ring.has_room:
            self._backoff.sleep()
        self._backoff.reset()
        self._ring.put(dataclasses.replace(record, steps=steps))

    def _value(self, observation: Tensor) -> Tensor:
        no_episode_begins = torch.zeros(len(observation), dtype=torch.bool)
        value = self._agent.act(
            observation, None, no_episode_begins, self._generator, greedy=True
        ).greedy_value
        return torch.zeros(len(observation)) if value is None else value

    def _refresh(self) -> None:
        """Load the newest parameters if the version has changed; wait for the first version."""
        backoff = Backoff()
        while self._parameters.version == 0:
            backoff.sleep()
        if self._parameters.version == self._version:
            return
        replicas = [self._agent.replicas[name] for name in self._agent.acting]
        vector = torch.empty(sum(len(replica) for replica in replicas))
        self._version = self._parameters.read(vector)
        with torch.no_grad():
            for replica, part in zip(replicas, torch.split(vector, [len(r) for r in replicas]), strict=True):
                replica.params.copy_(part)
                replica.reload()
                replica.clock = self._version - 1  # versions begin at 1, updates at 0


def _acting_replica(name: str, module: nn.Module, make_optimizer: Any, **options: Any) -> Replica:
    """A replica that is never updated. Creating an optimizer would make torch import its compiler, which
    takes as long as importing torch."""
    return Replica(name, module, lambda groups: cast(Any, _NoOptimizer(groups)), **options)


class _NoOptimizer:
    def __init__(self, groups: list[Any]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0} for _ in groups]


def _exit_with_learner(pipe: BinaryIO) -> None:
    pipe.read()  # returns when the learner's end is closed, however the learner exits
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    settings: ActorSettings = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_learner, args=(sys.stdin.buffer,), daemon=True).start()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    use_batch_scheduling()
    ActorLoop(settings).run()


if __name__ == "__main__":
    main()
