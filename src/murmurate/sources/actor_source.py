"""Batches from a replay that other processes fill: one learner and its actors (Ape-X, Horgan et al. 2018)."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from murmurate.agents.interface import Agent, AgentConfig
from murmurate.errors import RunFailed
from murmurate.fabric.interface import Channel
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.sources.actor import Orders
from murmurate.sources.bank_weights import Banks
from murmurate.sources.replay_sampler import Drawing
from murmurate.spec import Batch, EnvSpec, Episode
from murmurate.worlds.interface import World
from murmurate.worlds.spaces import Pauses, Record, Ring, Weights

_PATIENCE = 50  # pauses, before whoever learns is asked whether to go on
_LOOK_SECONDS = 0.5  # between two looks at who is alive
_SILENCE_SECONDS, _BEGINNING_SECONDS = (
    60.0,
    300.0,
)  # without a step: then an actor hangs; before its first one
_PACE = 20  # or so many times the longest it has ever taken, if that is more
_DEATHS = 5  # of one actor in a row without a step: then something is wrong with all of them


@dataclass
class _Actor:
    """One process. low: the number of its first simulator among the learner's. silent_seconds: that it was
    waited for in vain by now; longest_seconds: before any step so far."""

    index: int
    low: int
    simulators: int
    memory_file: SharedMemoryFile
    ring: Ring
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    silent_deaths: int = 0
    began: bool = False  # to send, this life
    silent_seconds: float = 0.0
    longest_seconds: float = 0.0

    def heard(self) -> None:
        if self.began:
            self.longest_seconds = max(self.longest_seconds, self.silent_seconds)
        self.began, self.silent_seconds, self.silent_deaths = True, 0.0, 0

    @property
    def hangs(self) -> bool:
        if not self.began:
            return self.silent_seconds > _BEGINNING_SECONDS
        return self.silent_seconds > max(_SILENCE_SECONDS, _PACE * self.longest_seconds)


@dataclass(frozen=True)
class Cast:
    """Who acts for a learner.

    actors: how many processes share its ``simulators``. rank, replicas: the learner among all, as the ladder
        of exploration goes over the simulators of all of them.
    """

    world: World
    agent: AgentConfig
    actors: int
    simulators: int
    rank: int
    replicas: int


class Acted:
    """Yields ``Batch(data=Sample)`` for ever. What the actors have played is taken in while fewer samples
    were drawn than ``samples_per_insert`` allows, and then waits: so whichever side is too fast is held back.

    Parameters are published every ``replay.publish_every`` updates; an actor plays each step with the
    newest, and is at most a few records ahead, which bounds how old the parameters of a step are.
    An actor that dies is started again, with games of its own, and told of in ``events``.
    """

    exact = False  # nobody saves an actor

    def __init__(
        self,
        cast: Cast,
        spec: EnvSpec,
        learner: Agent,
        drawing: Drawing,
        *,
        seed: int,
    ) -> None:
        self.cast, self.learner, self.replay = cast, learner, drawing.replay
        self.alive: Callable[[int], bool] = lambda played: False
        self._seed, self._drawing = seed, drawing
        count = sum(len(replica) for replica in learner.replicas.values())
        self._memory_file = SharedMemoryFile.create()
        self._weights = Weights(self._memory_file, count)
        bounds = [cast.simulators * k // cast.actors for k in range(cast.actors + 1)]
        self._actors = []
        for index, (low, high) in enumerate(itertools.pairwise(bounds)):
            memory_file = SharedMemoryFile.create()
            self._actors.append(
                _Actor(index, low, high - low, memory_file, Ring(memory_file, spec, high - low))
            )
        self._pauses = Pauses()
        self._turn = self._lag = self._lag_max = 0
        self._looked = 0.0
        self._events: list[tuple[str, str]] = []
        self._started = False

    def fields(self) -> dict[str, Any]:
        return {
            **self._drawing.fields(),
            "actor_lag_updates": self._lag,
            "actor_lag_updates_max": self._lag_max,
            "actor_deaths": sum(actor.lives - 1 for actor in self._actors if actor.lives),
        }

    def share(self, channel: Channel, learners: int) -> None:
        self._drawing.banks = Banks(channel, learners)

    def events(self) -> list[tuple[str, str]]:
        told, self._events = self._events, []
        return told

    def __iter__(self) -> Acted:
        return self

    def __next__(self) -> Batch:
        self._start()
        self._publish()
        played, episodes = 0, list[Episode]()
        while not self._drawing.due:
            found = self._next_record()
            if self.alive(played):
                return Batch(None, played, episodes)
            if found is None:
                continue
            record, actor = found
            played += actor.simulators
            episodes += self._take_in(record, actor)
        return self._drawing.next(played, episodes)

    def _next_record(self) -> tuple[Record, _Actor] | None:
        """From the next actor in turn that has one; waits a little for the first that does."""
        for _ in range(_PATIENCE):
            self._look()
            for _ in self._actors:
                actor = self._actors[self._turn % len(self._actors)]
                self._turn += 1
                if actor.ring.waiting:
                    actor.heard()
                    self._pauses.over()
                    return actor.ring.oldest(), actor
            self._pauses.sleep()
        return None

    def _take_in(self, record: Record, actor: _Actor) -> list[Episode]:
        self._drawing.before_steps()
        self._drawing.take_in(actor.low, record.steps)
        actor.ring.drop()
        self._lag = self.learner.clock + 1 - record.version
        self._lag_max = max(self._lag_max, self._lag)
        return [Episode(actor.low + e.simulator, e.episode_return, e.length) for e in record.episodes]

    def _publish(self, always: bool = False) -> None:
        if always or self.learner.clock + 1 >= self._weights.version + self._drawing.config.publish_every:
            vectors = [replica.params.detach().float().cpu() for replica in self.learner.replicas.values()]
            whole = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
            self._weights.publish(whole, self.learner.clock + 1)

    # -- processes ------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._started:
            self._publish(always=True)
            for actor in self._actors:
                self._begin(actor)
            self._started = True

    def _begin(self, actor: _Actor) -> None:
        cast = self.cast
        self.replay.restart(actor.low, actor.simulators)
        orders = Orders(
            world=cast.world,
            agent=cast.agent,
            simulators=actor.simulators,
            low=actor.low,
            first=cast.rank * cast.simulators + actor.low,
            total=cast.replicas * cast.simulators,
            seed=self._seed,
            life=f"{self._drawing.batches} {actor.lives}",
            weights=(self._memory_file.descriptor, len(self._weights)),
            ring=actor.memory_file.descriptor,
        )
        actor.process = subprocess.Popen(
            [sys.executable, "-m", "murmurate.sources.actor"],
            stdin=subprocess.PIPE,
            pass_fds=(self._memory_file.descriptor, actor.memory_file.descriptor),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        actor.lives += 1
        actor.began, actor.silent_seconds = False, 0.0
        if actor.process.stdin is None:
            raise RuntimeError("a pipe was asked for")
        try:
            actor.process.stdin.write(pickle.dumps(orders))
            actor.process.stdin.flush()  # and stays open for as long as we live
        except BrokenPipeError:
            pass  # the next look finds it dead
        words = f"actor {actor.index} of replica {cast.rank} began, process {actor.process.pid}"
        self._events.append(("actor began", words))

    def _look(self) -> None:
        """Start again whoever has died or hangs; what it had sent is still there."""
        elapsed = time.monotonic() - self._looked
        if elapsed < _LOOK_SECONDS:
            return
        self._looked += elapsed
        for actor in self._actors:
            if actor.process is None:
                continue
            if actor.ring.waiting:  # what it had sent comes before another one's games
                continue
            actor.silent_seconds += min(elapsed, 2 * _LOOK_SECONDS)  # of a longer time nobody listened
            name, code = f"actor {actor.index} of replica {self.cast.rank}", actor.process.poll()
            if code is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
            elif actor.hangs:
                how = f"hung: no step for {actor.silent_seconds:.0f} s"
            else:
                continue
            actor.silent_deaths += 1
            if actor.silent_deaths >= _DEATHS:
                raise RunFailed(
                    f"{name} died {_DEATHS} times without having made a step ({how}). What it said is in "
                    "logs/ in the run folder."
                )
            self._events.append(("actor died", f"{name} died ({how}) and is started again"))
            _forget(actor)
            self._begin(actor)

    def state(self) -> dict[str, Any]:
        """Between two batches only. What actors were playing is lost."""
        return {
            **self._drawing.state(),
            "groups": [None],
            "generator": torch.Generator().get_state(),
            "first": torch.ones(self.cast.simulators, dtype=torch.bool),
        }

    def load(self, state: dict[str, Any]) -> None:
        """As ``Replayed.load``; actors begin new games, unlike any before."""
        if len(state["first"]) != self.cast.simulators:
            raise ValueError(
                f"the state is of {len(state['first'])} simulators, these are {self.cast.simulators}"
            )
        self._drawing.load(state)

    def close(self) -> None:
        self._drawing.close()
        for actor in self._actors:
            _forget(actor)
            actor.memory_file.close()
        self._memory_file.close()


def _forget(actor: _Actor) -> None:
    if actor.process is not None:
        actor.process.kill()
        actor.process.wait()
        if actor.process.stdin is not None:
            actor.process.stdin.close()
