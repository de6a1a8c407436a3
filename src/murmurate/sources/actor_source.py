"""Batches from a replay that actor processes fill (Ape-X, Horgan et al. 2018)."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from murmurate.agents.interface import Agent
from murmurate.errors import RunFailed
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replicator.learner import updates_of
from murmurate.sources.actor import ActorSettings
from murmurate.sources.replay_sampler import ReplaySampler
from murmurate.sources.shared_ring import ActorRing, ActorStep, Backoff, SharedParameters
from murmurate.spec import Batch, EnvSpec, Episode
from murmurate.worlds.interface import SimulatorWorld

_POLLS = 50  # polls of the rings between two calls of ``alive``
_CHECK_SECONDS = 0.5  # between two checks of the actor processes
# an actor counts as hung after the longer of this time without a step, and ``_SLOWEST_FACTOR`` times its
# longest time between two steps so far
_SILENCE_SECONDS = 60.0
_STOPPED_SECONDS = 10.0  # without a step, where the operating system says that its process is stopped
_SLOWEST_FACTOR = 20
_STARTUP_SECONDS = 300.0  # before its first step
_DEATHS = 5  # the run fails after so many deaths of one actor in a row, each without a step


@dataclass
class _Actor:
    """One actor process.

    first_simulator: its index among the learner's simulators. silent_seconds: since its last step.
    longest_seconds: the longest time between two of its steps. silent_deaths: in a row, each without a step.
    """

    index: int
    first_simulator: int
    simulators: int
    memory_file: SharedMemoryFile
    ring: ActorRing
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    silent_deaths: int = 0
    has_sent: bool = False  # a step, since it was last started
    silent_seconds: float = 0.0
    longest_seconds: float = 0.0

    def note_step(self) -> None:
        if self.has_sent:
            self.longest_seconds = max(self.longest_seconds, self.silent_seconds)
        self.has_sent, self.silent_seconds, self.silent_deaths = True, 0.0, 0

    @property
    def is_hung(self) -> bool:
        if self.silent_seconds > _STOPPED_SECONDS and self.process and is_stopped(self.process.pid):
            return True
        if not self.has_sent:
            return self.silent_seconds > _STARTUP_SECONDS
        return self.silent_seconds > max(_SILENCE_SECONDS, _SLOWEST_FACTOR * self.longest_seconds)


@dataclass(frozen=True)
class ActorPlan:
    """The actors of a learner.

    actors: number of processes that share its ``simulators``. rank, replicas: of the learner; the epsilons
        are spread over the simulators of all learners. random_env_steps: of all these actors together.
    """

    world: SimulatorWorld
    agent: Any  # a LearnerConfig that requires transitions
    actors: int
    simulators: int
    rank: int
    replicas: int
    random_env_steps: int = 0


class ActorSource:
    """Yields ``Batch(data=Sample)`` without end (a ``Source``). Steps are inserted until
    ``samples_per_insert`` allows another batch; then they wait in the rings. So the faster of learner and
    actors waits for the other.

    Parameters are published every ``replay.publish_every`` updates. An actor acts with the newest, and its
    ring holds a few steps, which bounds the age of the parameters behind a step. An actor that dies is
    started again, with new random seeds, and reported by ``events``.
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
        self._seed, self._sampler = seed, sampler
        self._acting = [learner.replicas[name] for name in learner.acting]
        count = sum(len(replica) for replica in self._acting)
        self._memory_file = SharedMemoryFile.create()
        self._parameters = SharedParameters(self._memory_file, count)
        bounds = [plan.simulators * k // plan.actors for k in range(plan.actors + 1)]
        self._actors = []
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            memory_file = SharedMemoryFile.create()
            ring = ActorRing(memory_file, spec, stop - start, plan.agent.requires.behaviour)
            self._actors.append(_Actor(index, start, stop - start, memory_file, ring))
        self._backoff = Backoff()
        self._next_actor = self._lag = self._lag_max = 0
        self._checked_at = 0.0
        self._events: list[tuple[str, str]] = []
        self._restarts = 0  # of simulators
        self._started = False

    def fields(self) -> dict[str, Any]:
        return {
            **self._sampler.fields(),
            "actor_lag_updates": self._lag,
            "actor_lag_updates_max": self._lag_max,
            "actor_deaths": sum(actor.starts - 1 for actor in self._actors if actor.starts),
            **({"simulator_restarts": self._restarts} if self._restarts else {}),
        }

    def events(self) -> Sequence[tuple[str, str]]:
        events, self._events = self._events, []
        return events

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._start()
        self._publish()
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

    def _next_record(self) -> tuple[ActorStep, _Actor] | None:
        """The oldest record of the next actor, in round-robin order, that has one; None after a short wait
        without any."""
        for _ in range(_POLLS):
            self._check_actors()
            for _ in self._actors:
                actor = self._actors[self._next_actor % len(self._actors)]
                self._next_actor += 1
                if actor.ring.waiting_records:
                    actor.note_step()
                    self._backoff.reset()
                    return actor.ring.oldest(), actor
            self._backoff.sleep()
        return None

    def _insert(self, record: ActorStep, actor: _Actor) -> list[Episode]:
        self._sampler.before_steps()
        self._sampler.insert(actor.first_simulator, record.steps)
        actor.ring.drop()
        self._restarts += record.restarts
        self._lag = updates_of(self.learner) + 1 - record.version
        self._lag_max = max(self._lag_max, self._lag)
        return [
            Episode(actor.first_simulator + e.simulator, e.episode_return, e.length) for e in record.episodes
        ]

    def _publish(self, always: bool = False) -> None:
        version = updates_of(self.learner) + 1
        if always or version >= self._parameters.version + self._sampler.config.publish_every:
            vectors = [replica.params.detach().float().cpu() for replica in self._acting]
            self._parameters.publish(vectors[0] if len(vectors) == 1 else torch.cat(vectors), version)

    # -- processes ------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._started:
            self._publish(always=True)
            for actor in self._actors:
                self._spawn(actor)
            self._started = True

    def _spawn(self, actor: _Actor) -> None:
        plan = self.plan
        self.replay.restart(actor.first_simulator, actor.simulators)
        settings = ActorSettings(
            world=plan.world,
            agent=plan.agent,
            simulators=actor.simulators,
            first_simulator=actor.first_simulator,
            global_first_simulator=plan.rank * plan.simulators + actor.first_simulator,
            total_simulators=plan.replicas * plan.simulators,
            seed=self._seed,
            incarnation=f"{self._sampler.batches} {actor.starts}",
            random_env_steps=plan.random_env_steps * actor.simulators // plan.simulators,
            parameters=(self._memory_file.descriptor, len(self._parameters)),
            ring=actor.memory_file.descriptor,
        )
        actor.process = subprocess.Popen(
            [sys.executable, "-m", "murmurate.sources.actor"],
            stdin=subprocess.PIPE,
            pass_fds=(self._memory_file.descriptor, actor.memory_file.descriptor),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        actor.starts += 1
        actor.has_sent, actor.silent_seconds = False, 0.0
        if actor.process.stdin is None:
            raise RuntimeError("the actor process has no stdin")
        try:
            actor.process.stdin.write(pickle.dumps(settings))
            actor.process.stdin.flush()  # it stays open: the actor exits when it is closed
        except BrokenPipeError:
            pass  # the next check finds it dead
        message = f"actor {actor.index} of replica {plan.rank} began, process {actor.process.pid}"
        self._events.append(("actor began", message))

    def _check_actors(self) -> None:
        """Restart each actor that has died or hangs; the steps that it sent remain in its ring."""
        elapsed = time.monotonic() - self._checked_at
        if elapsed < _CHECK_SECONDS:
            return
        self._checked_at += elapsed
        for actor in self._actors:
            if actor.process is None:
                continue
            if actor.ring.waiting_records:  # these are inserted before it is started again
                continue
            # if more time has passed, this process did not poll
            actor.silent_seconds += min(elapsed, 2 * _CHECK_SECONDS)
            name, code = f"actor {actor.index} of replica {self.plan.rank}", actor.process.poll()
            if code is not None:
                cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            elif actor.is_hung:
                cause = f"hung: no step for {actor.silent_seconds:.0f} s"
            else:
                continue
            actor.silent_deaths += 1
            if actor.silent_deaths >= _DEATHS:
                raise RunFailed(
                    f"{name} died {_DEATHS} times without having made a step ({cause}). See its output "
                    "in logs/ in the run folder."
                )
            self._events.append(("actor died", f"{name} died ({cause}) and is started again"))
            _kill(actor)
            self._spawn(actor)

    def state(self) -> dict[str, Any]:
        """Between two batches only. The actors' unfinished episodes are lost."""
        return {
            **self._sampler.state(),
            "groups": [None],
            "generator": torch.Generator().get_state(),
            "first": torch.ones(self.plan.simulators, dtype=torch.bool),
        }

    def load(self, state: dict[str, Any]) -> None:
        """As ``ReplaySource.load``; actors begin new episodes, with new seeds."""
        if len(state["first"]) != self.plan.simulators:
            raise ValueError(
                f"the state is of {len(state['first'])} simulators, these are {self.plan.simulators}"
            )
        self._sampler.load(state)

    def fresh_start(self, batches: int) -> None:
        """With an empty replay; actors have not started yet."""
        self._sampler.fresh_start(batches)

    def close(self) -> None:
        self._sampler.close()
        for actor in self._actors:
            _kill(actor)
            actor.memory_file.close()
        self._memory_file.close()


def _kill(actor: _Actor) -> None:
    if actor.process is not None:
        actor.process.kill()
        actor.process.wait()
        if actor.process.stdin is not None:
            actor.process.stdin.close()
