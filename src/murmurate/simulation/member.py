"""What the members of a simulated run do: the learner's loop and the centre's, on virtual time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from murmurate.agents.interface import Agent
from murmurate.fabric.interface import Capability, Channel
from murmurate.fabric.simulated.fabric import Member
from murmurate.record.step_timer import NEVER, Bursts
from murmurate.record.step_timer import Watch as Diary
from murmurate.replicator.learner import updates_of
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, Outcome, derive_seed
from murmurate.training.members import learner_of, open_source
from murmurate.training.rejoin import adopted
from murmurate.training.run import Run
from murmurate.training.worker_context import FINAL_REQUEST, SETTLE_SECONDS


class Watch(Protocol):
    """What a learner tells whoever watches the run from outside of it, and asks. Costs no virtual time."""

    def stepped(self, learner: Learner, batch: Batch) -> None: ...
    def over(self, learner: Learner) -> bool: ...
    def admission_due(self, learner: Learner) -> bool: ...
    def admit(self, learner: Learner) -> None: ...
    def finish(self, learner: Learner) -> None: ...
    def left(self, learner: Learner) -> None: ...
    def all_left(self) -> bool: ...


@dataclass(frozen=True)
class Spent:
    """What a life has cost so far, in virtual seconds and bytes."""

    lived_seconds: float
    computing_seconds: float
    waiting_seconds: float
    exchanging_seconds: float
    bytes: int


class Learner:
    """One replica: the loop of design section 3, with the seconds that each step takes.

    ``life`` counts from 0 how often this rank has begun; later ones play other games. ``steps`` yields
    (seconds busy, seconds asleep afterwards). ``bursts``: when it notes what it does.
    """

    def __init__(
        self, run: Run, door: Member, steps: Iterator[tuple[float, float]], life: int, bursts: Bursts = NEVER
    ) -> None:
        self.run, self.door, self.rank, self.life = run, door, door.rank, life
        self.began_seconds = door.now
        self.busy_seconds = 0.0
        self._ended: Spent | None = None
        self.env_steps = 0
        self.outcome = Outcome()
        self._steps = steps
        self.replicator = Replicator(run.strategy, door)
        self.agent: Agent = learner_of(run, self.rank, self.replicator)
        games = dataclasses.replace(run, seed=derive_seed(run.seed, "life", life)) if life else run
        self.source = open_source(games, self.rank, self.agent, door)
        self.synchronous = run.strategy.synchronous and door.size > 1
        self._gate: Channel | None = None
        if self.synchronous:
            self._gate = door.channel("gate", torch.zeros(1))
        gates = [] if self._gate is None else [self._gate]
        self.diary = Diary(lambda: door.now, list(self.replicator.bonds.values()), gates, bursts)

    @property
    def clock(self) -> int:
        return updates_of(self.agent)

    def adopt(self, donor: Learner) -> None:
        """Take a living peer's learning, as ``murmurate.training.rejoin`` does; then be one of all."""
        self.replicator.load(adopted(self.replicator, donor.replicator.state()))
        self.agent.load(donor.agent.state())
        self.door.join()
        self.replicator.entered()
        if Capability.SHARED_MEMORY not in self.run.strategy.needs:
            for bond in self.replicator.bonds.values():
                bond.channel.traffic.bytes += bond.replica.params.nbytes

    def go(self, watch: Watch) -> None:
        """Learn until the watch says that it is over."""
        self.replicator.publish()
        for batch in self.source:
            busy, asleep = next(self._steps)
            self.door.compute(busy)
            self.busy_seconds += busy
            self.diary.lap("learn")
            self.outcome = self.agent.learn(batch)
            batch.feedback(self.outcome.priorities)
            self.env_steps += batch.env_steps
            watch.stepped(self, batch)
            if asleep:
                self.door.compute(asleep)
                self.diary.lap(None)
            if self._round_ended():
                if self._gate is not None and watch.admission_due(self):
                    self._gate.mean_(torch.zeros(1))  # all are between the same two rounds now
                    watch.admit(self)
                if watch.over(self):
                    break
            self.diary.turn()
        watch.finish(self)
        self.replicator.drain(FINAL_REQUEST, SETTLE_SECONDS)
        self.replicator.publish()
        self.source.close()
        watch.left(self)

    def spent(self) -> Spent:
        """Until it had finished, or until now."""
        return self._ended or Spent(
            lived_seconds=self.door.now - self.began_seconds,
            computing_seconds=self.busy_seconds,
            waiting_seconds=self.replicator.waiting_seconds,
            exchanging_seconds=self.door.exchanging_seconds,
            bytes=self.replicator.bytes_exchanged,
        )

    def end(self) -> None:
        """It has died, or finished learning: what it does from now on is not counted."""
        self._ended = self.spent()

    def _round_ended(self) -> bool:
        if not self.synchronous or self.clock >= (self.run.updates or math.inf):
            return True
        return self.replicator.between_rounds


class Centre:
    """The last member of a run whose strategy has a centre."""

    def __init__(self, run: Run, door: Member) -> None:
        self.replicator = Replicator(run.strategy, door)
        self.agent: Agent = learner_of(run, door.rank, self.replicator)

    def go(self, watch: Watch) -> None:
        """Serve until every learner has finished."""
        self.replicator.serve_until(watch.all_left)
        self.replicator.drain(FINAL_REQUEST, SETTLE_SECONDS)
        self.replicator.publish()
