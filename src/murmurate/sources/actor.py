"""An actor: a process that acts with the newest published parameters, and sends its steps to its learner.

Ape-X (Horgan et al. 2018, Algorithm 1): each simulator has its own epsilon, and the initial priority of a
step is computed here, from action values that acting needs anyway.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from murmurate.agents.interface import Action
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.sources.actor_agent import ActorAgent, ActorSettings, run_actor
from murmurate.sources.polling import Backoff
from murmurate.sources.shared_ring import ActorRing, ActorStep
from murmurate.sources.simulator_groups import RestartMessages
from murmurate.sources.steps import random_actions, steps_of
from murmurate.spec import derive_generator, derive_seed
from murmurate.worlds.interface import Simulators


class ActorLoop:
    """The actor's loop: refresh the parameters, act, step, send."""

    def __init__(self, settings: ActorSettings) -> None:
        self.settings = settings
        self._simulators: Simulators = settings.world.open(
            settings.simulators, training=True, first=settings.first_simulator
        )
        self._spec = self._simulators.spec
        self._actor_agent = ActorAgent(settings, self._spec)
        self._agent = self._actor_agent.agent
        behaviour = settings.agent.requires.behaviour
        self._ring = ActorRing(SharedMemoryFile(settings.ring), self._spec, settings.simulators, behaviour)
        self._generator = derive_generator(
            settings.seed, f"actions {settings.incarnation}", settings.global_first_simulator
        )
        self._backoff = Backoff(settings.poll_seconds)

    def run(self) -> None:
        settings = self.settings
        step = self._simulators.reset(derive_seed(settings.seed, f"games {settings.incarnation}"))
        memory = self._agent.initial_memory(settings.simulators)
        first = torch.ones(settings.simulators, dtype=torch.bool)
        pending: ActorStep | None = None
        restarts = list(step.restarts)  # since the last step that was recorded
        messages = RestartMessages()
        _tell(messages.told(restarts))
        played = 0
        while True:
            self._actor_agent.refresh()
            observation = step.observation
            action = self._act(observation, memory, first)
            if played < settings.random_env_steps:
                action = self._with_random_actions(action, observation)
            played += settings.simulators
            memory, version = action.memory, self._actor_agent.version
            if pending is not None:  # the value of its next observation is only known now
                self._send(pending, action.greedy_value)
            self._simulators.send(action.action)
            step = self._simulators.receive()
            first = step.terminated | step.truncated
            steps = steps_of(observation, action, step)._replace(action_value=action.action_value)
            count = len(restarts) + len(step.restarts)
            pending = ActorStep(steps, list(step.episodes), version, count, settings.starts_before)
            restarts.clear()
            _tell(messages.told(step.restarts))

    @torch.no_grad()  # as learners act: what is sent would keep the graphs of all steps
    def _act(self, observation: Tensor, memory: Tensor | None, first: Tensor, greedy: bool = False) -> Action:
        return self._agent.act(observation, memory, first, self._generator, greedy=greedy)

    def _with_random_actions(self, action: Action, observation: Tensor) -> Action:
        random = random_actions(self._spec, observation, self._generator)
        return action._replace(action=random, action_value=None)

    def _send(self, record: ActorStep, next_value: Tensor | None) -> None:
        steps = record.steps
        if steps.action_value is None or next_value is None:
            steps = steps._replace(action_value=None, next_value=None)
        else:
            if steps.truncated.any():  # there ``next_value`` belongs to the next episode's first observation
                next_value = next_value.clone()
                next_value[steps.truncated] = self._greedy_value(steps.next_observation[steps.truncated])
            steps = steps._replace(next_value=next_value)
        while not self._ring.has_room:
            self._backoff.sleep()
        self._backoff.reset()
        self._ring.put(dataclasses.replace(record, steps=steps))

    def _greedy_value(self, observation: Tensor) -> Tensor:
        no_episode_begins = torch.zeros(len(observation), dtype=torch.bool)
        value = self._act(observation, None, no_episode_begins, greedy=True).greedy_value
        return torch.zeros(len(observation)) if value is None else value


def _tell(messages: Sequence[str]) -> None:
    for message in messages:
        print(message, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point of the actor process."""
    run_actor(lambda settings: ActorLoop(settings).run())


if __name__ == "__main__":
    main()
