"""Batches from a replay that actor processes fill (Ape-X, Horgan et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from murmurate.agents.interface import Agent
from murmurate.replicator.learner import updates_of
from murmurate.sources.actor_processes import ActorPlan, ActorProcess, ActorProcesses
from murmurate.sources.polling import Backoff
from murmurate.sources.replay_sampler import ReplaySampler
from murmurate.sources.shared_ring import ActorRing, ActorStep
from murmurate.sources.simulator_groups import check_loaded_simulators
from murmurate.spec import Batch, EnvSpec, Episode

_POLLS = 50  # most polls of the rings between two calls of ``alive``


class ActorSource:
    """Yields ``Batch(data=Sample)`` without end (a ``Source``). Steps are inserted until
    ``samples_per_insert`` allows another batch; then they wait in the rings. So whichever is faster, the
    learner or the actors, waits for the other.

    Parameters are published every ``replay.publish_every`` updates. An actor acts with the newest, and its
    ring holds only a few steps, which bounds the age of the parameters that a step was made with. An actor
    that dies is started again, with new random seeds, and reported by ``events``.

    learner: its parameters are published. sampler: closed by ``close``. Requesting a batch raises RunFailed
    if an actor fails for good, or dies again and again without having sent steps.
    """

    exact = False  # the state of actors is not saved

    def __init__(
        self,
        plan: ActorPlan,
        spec: EnvSpec,
        learner: Agent,
        sampler: ReplaySampler,
        *,
        seed: int,
    ) -> None:
        self.plan, self.learner, self.replay = plan, learner, sampler.replay
        self.alive: Callable[[int], bool] = lambda played: False
        self._sampler = sampler
        behaviour = plan.agent.requires.behaviour
        self._processes = ActorProcesses(
            plan,
            learner,
            "murmurate.sources.actor",
            lambda memory_file, size: ActorRing(memory_file, spec, size, behaviour),
            seed=seed,
        )
        self._incarnations = [-1] * plan.actors  # ``ActorStep.incarnation`` of each actor's last record
        self._backoff = Backoff()
        self._lag = self._lag_max = 0
        self._restarts = 0  # number of simulators that were replaced because they had failed

    def fields(self) -> dict[str, Any]:
        return {
            **self._sampler.fields(),
            "actor_lag_updates": self._lag,
            "actor_lag_updates_max": self._lag_max,
            "actor_deaths": self._processes.deaths,
            **({"simulator_restarts": self._restarts} if self._restarts else {}),
        }

    def events(self) -> Sequence[tuple[str, str]]:
        return self._processes.taken_events()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._processes.publish_if_due(self._sampler.config.publish_every)
        self._processes.start(self._sampler.batches, self._sampler.played)
        played, episodes = 0, list[Episode]()
        while not self._sampler.due:
            received = self._next_record()
            if self.alive(played):
                return Batch(None, played, episodes)
            if received is None:
                continue
            record, actor = received
            played += actor.simulators
            episodes += self._insert(record, actor)
        return self._sampler.next(played, episodes)

    def _next_record(self) -> tuple[ActorStep, ActorProcess[ActorRing]] | None:
        """(oldest record, actor) of the next actor with a record; None if none came within a short wait."""
        for _ in range(_POLLS):
            self._processes.check(self._sampler.batches, self._sampler.played)
            if (actor := self._processes.next_waiting()) is not None:
                self._backoff.reset()
                return actor.ring.oldest(), actor
            self._backoff.sleep()
        return None

    def _insert(self, record: ActorStep, actor: ActorProcess[ActorRing]) -> list[Episode]:
        if record.incarnation != self._incarnations[actor.index]:  # a former process left steps unfinished
            self._incarnations[actor.index] = record.incarnation
            self.replay.restart(actor.first_simulator, actor.simulators)
        self._sampler.before_steps()
        self._sampler.insert(actor.first_simulator, record.steps)
        actor.ring.drop()
        self._restarts += record.restarts
        self._lag = updates_of(self.learner) + 1 - record.version
        self._lag_max = max(self._lag_max, self._lag)
        return [episode.numbered_from(actor.first_simulator) for episode in record.episodes]

    def state(self) -> dict[str, Any]:
        """Call it between two batches only. The actors' unfinished episodes are lost."""
        return {
            **self._sampler.state(),
            "groups": [None],  # this and below: what a ``ReplaySource`` needs to load the state
            "generator": torch.Generator().get_state(),
            "first": torch.ones(self.plan.simulators, dtype=torch.bool),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Like ``ReplaySource.load``, but the actors begin new episodes, with new seeds."""
        check_loaded_simulators(state, self.plan.simulators)
        self._sampler.load(state)

    def fresh_start(self, batches: int) -> None:
        """Begin with an empty replay; to be called before the actors have started."""
        self._sampler.fresh_start(batches)

    def close(self) -> None:
        self._sampler.close()
        self._processes.close()
