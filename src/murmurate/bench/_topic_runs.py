"""Perplexity of simulated DPSVI runs over documents and virtual seconds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from murmurate.datasets.corpus import Corpus
from murmurate.datasets.interface import DataSet, Subset
from murmurate.fabric.simulated.fabric import Member, SimulatedFabric
from murmurate.replica.vector import Exchange, Replica
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.member import Centre, SimulatedLearner
from murmurate.spec import Batch, derive_seed
from murmurate.training.run import Run
from murmurate.workloads.conjugate import ConjugateLearner
from murmurate.workloads.topics import Topics


class PerplexityPoint(NamedTuple):
    """A perplexity. documents: number of documents from which the replicas together have learned. seconds:
    virtual time. folds: number of steps of the master."""

    documents: int
    seconds: float
    perplexity: float
    folds: int = 0


@dataclasses.dataclass(frozen=True)
class EvaluationSchedule:
    """When the perplexity of the validation documents is computed, and when the run ends.

    First after ``first`` documents, then whenever the number of documents has grown ``factor``-fold (or by
    ``first``, if factor is 1); with ``folded``, only once the master has made a new step (a fold). The run
    ends when the perplexity reaches ``target``, or after ``most`` documents.
    """

    validation: Corpus
    first: int
    factor: float
    most: int
    target: float = 0.0
    folded: bool = False


class _PerplexityMonitor:
    """The ``RunControl`` of these runs. It evaluates the centre's topics, or a lone learner's, without using
    virtual time."""

    def __init__(self, schedule: EvaluationSchedule, learners: int) -> None:
        self.schedule = schedule
        self.evaluated: list[PerplexityPoint] = []
        self.documents, self._next, self._left = 0, float(schedule.first), learners
        self.centre: Centre | None = None
        self._reached_target = False
        self._folds = 0  # number of folds at the last evaluation

    def stepped(self, learner: SimulatedLearner, batch: Batch) -> None:
        self.documents += batch.env_steps
        if self.documents < self._next:
            return
        folds = 0 if self.centre is None else self.centre.replicator.folds
        if self.schedule.folded and self.centre is not None and folds == self._folds:
            return
        self._folds = folds
        evaluated_member = learner if self.centre is None else self.centre
        topics = cast(ConjugateLearner[Topics], evaluated_member.agent).estimate()
        now, perplexity = learner.member.now, topics.completion_perplexity(self.schedule.validation)
        self.evaluated.append(PerplexityPoint(self.documents, now, perplexity, folds))
        if self.schedule.factor == 1:
            self._next += self.schedule.first
        else:
            self._next = self.documents * self.schedule.factor
        self._reached_target |= perplexity <= self.schedule.target

    def is_over(self, learner: SimulatedLearner) -> bool:
        return self._reached_target or self.documents >= self.schedule.most

    def joiners_waiting(self, learner: SimulatedLearner) -> bool:
        return False

    def admit_joiners(self, learner: SimulatedLearner) -> None:
        raise RuntimeError("no member joins these runs")

    def finish(self, learner: SimulatedLearner) -> None:
        pass

    def drained(self, learner: SimulatedLearner) -> None:
        self._left -= 1

    def all_drained(self) -> bool:
        return self._left == 0


def evaluations(
    run: Run, cluster: Cluster, schedule: EvaluationSchedule, *, dense: bool = False
) -> list[PerplexityPoint]:
    """Simulate ``run`` on ``cluster`` and evaluate its topics on the way.

    The time that an update takes passes between reading the topics and writing to them, so the threads of a
    node overtake one another, as real ones do. In ``murmurate simulate`` it passes before the reading. dense:
    whether gradients have all rows, so that whole vectors are pushed. Raises StepTooLarge for a step that
    would shrink a vector to zero or beyond.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    monitor = _PerplexityMonitor(schedule, run.replicas)
    fabric = SimulatedFabric(
        run.members,
        derive_seed(run.seed, "schedule") % 2**32,
        network=cluster.network_model(),
        capabilities=run.strategy.needs,
        keep_log=False,
        own_clocks=True,
    )

    def learn(member: Member) -> None:
        learner = SimulatedLearner(run, member, itertools.repeat((0.0, 0.0)), 0)
        generator = np.random.default_rng(derive_seed(run.seed, "compute", member.rank))
        seconds = cluster.compute_model().steps(member.rank, generator)
        (bound,) = learner.replicator.bound_replicas.values()

        def step(replica: Replica) -> Exchange:
            member.compute(next(seconds)[0])
            return bound.step(replica)

        bound.replica.exchange = step
        # without ``keeps_scale``, gradients of a few rows are made dense
        bound.replica.scale.keeps_scale = bound.replica.scale.keeps_scale and not dense
        learner.run_to_end(monitor)

    def serve(member: Member) -> None:
        monitor.centre = Centre(run, member)
        monitor.centre.run_to_end(monitor)

    fabric.run([learn] * run.replicas + [serve] * run.strategy.centre)
    return monitor.evaluated


def reached(curve: Sequence[PerplexityPoint], target: float) -> PerplexityPoint | None:
    """The first evaluation at ``target`` or below; None if there is none.

    There is no interpolation, because the perplexity falls in steps, with each fold.
    """
    return next((point for point in curve if point.perplexity <= target), None)


def validation(world: DataSet) -> Corpus:
    """The documents of a corpus that are kept for validation."""
    kept: Subset[Corpus] = world.divided().validation
    return kept.select(range(len(kept)))
