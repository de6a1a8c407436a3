"""DPSVI in virtual time, looked at from outside: its perplexity after so many documents and seconds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from murmurate.datasets.corpus import Corpus
from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.datasets.interface import Subset
from murmurate.errors import RunFailed
from murmurate.fabric.simulated.fabric import Crashed, Member, SimulatedFabric
from murmurate.replica.vector import Exchange, Replica
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.member import Centre, SimulatedLearner
from murmurate.spec import Batch, derive_seed
from murmurate.training.run import Run
from murmurate.workloads.conjugate import ConjugateLearner
from murmurate.workloads.topics import Topics


class Look(NamedTuple):
    """documents: learned from by all replicas so far. seconds: virtual. folds: steps of the master so far."""

    documents: int
    seconds: float
    perplexity: float
    folds: int = 0


@dataclasses.dataclass(frozen=True)
class Looking:
    """Validation documents and when they are looked at: after ``first`` documents, then each time after
    ``factor`` times as many (or ``first`` more, where that is 1); with ``folded`` not before the master has
    folded something new. A run ends once its perplexity is at ``target``, or after ``most`` documents."""

    validation: Corpus
    first: int
    factor: float
    most: int
    target: float = 0.0
    folded: bool = False


class _Watch:
    """Looks at the centre's topics, or at the one learner's, at no cost of virtual time."""

    def __init__(self, looking: Looking, learners: int) -> None:
        self.looking = looking
        self.looks: list[Look] = []
        self.documents, self._next, self._left = 0, float(looking.first), learners
        self.centre: Centre | None = None
        self.over_at = math.inf
        self._folds = 0  # when it was looked at last

    def stepped(self, learner: SimulatedLearner, batch: Batch) -> None:
        self.documents += batch.env_steps
        if self.documents < self._next:
            return
        folds = 0 if self.centre is None else self.centre.replicator.folds
        if self.looking.folded and self.centre is not None and folds == self._folds:
            return
        self._folds = folds
        shown = learner if self.centre is None else self.centre
        found = cast(ConjugateLearner[Topics], shown.agent).found()
        now, perplexity = learner.member.now, found.completion_perplexity(self.looking.validation)
        self.looks.append(Look(self.documents, now, perplexity, folds))
        if self.looking.factor == 1:
            self._next += self.looking.first
        else:
            self._next = self.documents * self.looking.factor
        if perplexity <= self.looking.target:
            self.over_at = now

    def is_over(self, learner: SimulatedLearner) -> bool:
        return self.over_at < math.inf or self.documents >= self.looking.most

    def admission_due(self, learner: SimulatedLearner) -> bool:
        return False

    def admit(self, learner: SimulatedLearner) -> None:
        raise RuntimeError("nobody comes late here")

    def finish(self, learner: SimulatedLearner) -> None:
        pass

    def drained(self, learner: SimulatedLearner) -> None:
        self._left -= 1

    def all_drained(self) -> bool:
        return self._left == 0


def looks(run: Run, cluster: Cluster, looking: Looking, *, dense: bool = False) -> list[Look]:
    """What is seen of ``run`` on ``cluster``.

    The seconds of an update lie between reading the topics and writing to them: the threads of a node
    overtake one another, as real ones do. ``murmurate simulate`` lets them pass before the reading.
    dense: gradients of all rows, and so whole vectors pushed. Raises RunFailed if a member fails.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    network = cluster.network_model()
    watch = _Watch(looking, run.replicas)
    fabric = SimulatedFabric(
        run.members,
        derive_seed(run.seed, "schedule") % 2**32,
        network=network,
        capabilities=run.strategy.needs,
        keep_log=False,
        own_clocks=True,
    )

    def learn(door: Member) -> None:
        learner = SimulatedLearner(run, door, itertools.repeat((0.0, 0.0)), 0)
        generator = np.random.default_rng(derive_seed(run.seed, "compute", door.rank))
        seconds = cluster.compute_model().steps(door.rank, generator)
        (bond,) = learner.replicator.bonds.values()

        def step(replica: Replica) -> Exchange:
            door.compute(next(seconds)[0])
            return bond.step(replica)

        bond.replica.exchange = step
        bond.replica.scale.kept = bond.replica.scale.kept and not dense
        learner.run_to_end(watch)

    def serve(door: Member) -> None:
        watch.centre = Centre(run, door)
        watch.centre.run_to_end(watch)

    ended = fabric.run([learn] * run.replicas + [serve] * run.strategy.centre)
    if any(isinstance(end, Crashed) for end in ended):
        raise RunFailed(f"a member of {run.strategy.name} with {run.replicas} replicas died")
    return watch.looks


def reached(seen: Sequence[Look], target: float) -> Look | None:
    """The first look at ``target`` or below; None if there is none. Perplexity falls in steps, with each
    fold: nothing is read off between two looks."""
    return next((one for one in seen if one.perplexity <= target), None)


def validation(run: Run) -> Corpus:
    """The documents that ``run`` keeps back to look at."""
    if not isinstance(run.world, CorpusWorld):
        raise ValueError(f"{run.recipe} has no documents")
    kept: Subset[Corpus] = run.world.divided().validation
    return kept.select(range(len(kept)))
