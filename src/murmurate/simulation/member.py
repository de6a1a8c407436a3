"""The members of a simulated run, learners and centre, on virtual time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from murmurate.agents.interface import Agent
from murmurate.fabric.interface import Capability
from murmurate.fabric.simulated.fabric import Member
from murmurate.record.step_timer import NO_TRACE, StepTimer, TraceSchedule
from murmurate.replicator.learner import updates_of
from murmurate.spec import Batch, Outcome, derive_seed
from murmurate.training.members import learner_of, open_source
from murmurate.training.rejoin import state_to_load
from murmurate.training.restore import replicator_of
from murmurate.training.run import Run
from murmurate.training.worker_context import BATCHES_TO_DECISION, DRAIN_SECONDS, FINAL_REQUEST


class RunControl(Protocol):
    """Decides when the run ends and when joiners are admitted, and is told of every learner's progress.

    Implemented by the run's ``Monitor``; its methods take no virtual time.
    """

    def stepped(self, learner: SimulatedLearner, batch: Batch) -> None: ...
    def is_over(self, learner: SimulatedLearner) -> bool: ...
    def joiners_waiting(self, learner: SimulatedLearner) -> bool: ...
    def admit_joiners(self, learner: SimulatedLearner) -> None: ...
    def finish(self, learner: SimulatedLearner) -> None: ...
    def drained(self, learner: SimulatedLearner) -> None: ...
    def all_drained(self) -> bool: ...


@dataclass(frozen=True)
class Costs:
    """The costs of one incarnation so far, in virtual seconds and bytes."""

    alive_seconds: float
    computing_seconds: float
    waiting_seconds: float
    exchanging_seconds: float
    bytes: int


class SimulatedLearner:
    """The training loop of one replica, whose steps take virtual seconds.

    incarnation: counts this rank's starts from 0; the source of each has its own random seeds. steps: yields
    (seconds busy, seconds asleep afterwards) for each step. trace_schedule: when spans are recorded.
    """

    def __init__(
        self,
        run: Run,
        member: Member,
        steps: Iterator[tuple[float, float]],
        incarnation: int,
        trace_schedule: TraceSchedule = NO_TRACE,
    ) -> None:
        self.run, self.member, self.rank = run, member, member.rank
        self.began_seconds = member.now
        self.busy_seconds = 0.0
        self._final_costs: Costs | None = None
        self.env_steps = self.batches = 0
        self.outcome = Outcome()
        self._steps = steps
        self.replicator = replicator_of(run, member)
        self.agent: Agent = learner_of(run, self.rank, self.replicator)
        if incarnation:
            run = dataclasses.replace(run, seed=derive_seed(run.seed, "life", incarnation))
        self.source = open_source(run, self.rank, self.agent, member)
        self.synchronous = run.strategy.synchronous and member.size > 1
        self._barrier = member.channel("barrier", torch.zeros(1)) if self.synchronous else None
        barriers = [] if self._barrier is None else [self._barrier]
        self.timer = StepTimer(
            lambda: member.now, list(self.replicator.bound_replicas.values()), barriers, trace_schedule
        )

    @property
    def updates(self) -> int:
        return updates_of(self.agent)

    @property
    def staleness_max(self) -> int:
        """The greatest staleness of all replicas so far."""
        return max((bound.staleness_max for bound in self.replicator.bound_replicas.values()), default=0)

    def load_state_from_peer(self, donor: SimulatedLearner) -> None:
        """Join with a living peer's state, as in ``murmurate.training.rejoin``."""
        self.replicator.load(state_to_load(self.replicator, donor.replicator.state()))
        self.agent.load(donor.agent.state())
        self.batches = donor.batches
        self.source.fresh_start(self.batches)
        self.member.join()
        self.replicator.rejoined()
        if Capability.SHARED_MEMORY not in self.run.strategy.needs:
            for bound in self.replicator.bound_replicas.values():
                bound.channel.traffic.bytes += bound.replica.params.nbytes

    def run_to_end(self, control: RunControl) -> None:
        """Learn until ``control`` ends the run. The source is closed even if this incarnation dies."""
        try:
            self._learn(control)
            control.finish(self)
            self.replicator.drain(FINAL_REQUEST, DRAIN_SECONDS)
            self.replicator.publish()
        finally:
            self.source.close()
        control.drained(self)

    def _learn(self, control: RunControl) -> None:
        self.replicator.publish()
        for batch in self.source:
            busy_seconds, sleep_seconds = next(self._steps)
            self.member.compute(busy_seconds)
            self.busy_seconds += busy_seconds
            self.timer.lap("learn")
            self.outcome = self.agent.learn(batch)
            batch.feedback(self.outcome.priorities)
            self.env_steps += batch.env_steps
            self.batches += 1
            control.stepped(self, batch)
            if sleep_seconds:
                self.member.compute(sleep_seconds)
                self.timer.lap(None)
            if self._may_decide():
                between_rounds = self.replicator.between_rounds
                if self._barrier is not None and between_rounds and control.joiners_waiting(self):
                    self._barrier.mean_(torch.zeros(1))  # barrier: every learner has finished the same round
                    control.admit_joiners(self)
                if control.is_over(self):
                    break
            self.timer.end_iteration()

    def costs(self) -> Costs:
        """The costs until this incarnation finished or died, else until now."""
        return self._final_costs or Costs(
            alive_seconds=self.member.now - self.began_seconds,
            computing_seconds=self.busy_seconds,
            waiting_seconds=self.replicator.waiting_seconds,
            exchanging_seconds=self.member.exchanging_seconds,
            bytes=self.replicator.bytes_exchanged,
        )

    def freeze_costs(self) -> None:
        """Called when this incarnation has died or finished learning: ``costs`` then stays the same."""
        self._final_costs = self.costs()

    def _may_decide(self) -> bool:
        """As ``TrainingLoop._may_decide``."""
        if not self.synchronous or self.updates >= (self.run.updates or math.inf):
            return True
        return self.replicator.between_rounds or self.batches % BATCHES_TO_DECISION == 0


class Centre:
    """The centre's process: the member with the highest rank, in a run whose strategy has a centre."""

    def __init__(self, run: Run, member: Member) -> None:
        self.replicator = replicator_of(run, member)
        self.agent: Agent = learner_of(run, member.rank, self.replicator)

    def run_to_end(self, control: RunControl) -> None:
        """Serve until every learner has finished."""
        self.replicator.serve_until(control.all_drained)
        self.replicator.drain(FINAL_REQUEST, DRAIN_SECONDS)
        self.replicator.publish()
