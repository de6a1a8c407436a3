"""The interface between the training loop and learners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from murmurate.replica.vector import Replica
from murmurate.replicator.collectives import Group
from murmurate.spec import Batch, EnvSpec, Outcome, Requirement

Replicate = Callable[..., Replica]  # as ``Replicator.replicate``, or ``Replica`` itself


@dataclass(frozen=True)
class Context:
    """The arguments for building a learner.

    spec: spec of its world. replicate: makes its replicas (``Replica`` itself, where nothing is exchanged).
    seed: seed of the run, the same for all replicas. device: device of the replica. updates: planned
    updates over the whole run, for schedules: own ones, or those of all replicas if the strategy's schedules
    count these; None if only time ends it. own_updates: planned own ones. examples, validation: training and
    held-out examples, where the world is a data set; the held-out ones are given to replica 0 alone, or to
    all if ``identical``. averaged: how many replicas' gradients are averaged for each update (1: each follows
    its own). identical: whether all replicas have the same parameters after each update, and ``group``.
    open_group: see ``group``. rank: rank of the replica, for random numbers of its own. heartbeat: to be
    called now and then within a ``learn`` that takes much longer than others, as members that are silent for
    long are excluded.
    """

    spec: EnvSpec
    replicate: Replicate
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    updates: int | None = None
    own_updates: int | None = None
    examples: Any = None
    validation: Any = None
    averaged: int = 1
    identical: bool = False
    open_group: Callable[[], Group] | None = None
    rank: int = 0
    heartbeat: Callable[[], None] = lambda: None

    def group(self) -> Group:
        """Collectives among the replicas, for example for statistics or advantages. All replicas must call it
        in ``build``; it can be used from the first batch on. A learner that runs alone, in an evaluation for
        example, is a group of one.

        Where replicas have several parts (``--parts``), only ``BatchNorm`` can use it in training. Raises
        Refusal under a strategy whose replicas do not wait for one another.
        """
        return Group.of_one() if self.open_group is None else self.open_group()


class Learner(Protocol):
    """Learns from batches: one replica's part of a run."""

    @property
    def replicas(self) -> dict[str, Replica]:
        """The learner's replicas by name, one for each optimizer; the names are keys of checkpoints."""
        ...

    def learn(self, batch: Batch) -> Outcome:
        """Make any number of updates from ``batch``, each by ``Replica.descend`` or ``Replica.follow``."""
        ...

    def state(self) -> dict[str, Any]:
        """State to be saved beside the replicas: tensors and plain values, nested."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...


class LearnerConfig(Protocol):
    """Hyper-parameters of a learner: a frozen dataclass, in ``agents/`` or ``workloads/``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    summary: ClassVar[str]

    @property
    def requires(self) -> Requirement: ...

    @property
    def collectives_in_backward(self) -> bool:
        """Whether the learner may differentiate collectives: members in one process then need a thread
        each."""
        return False

    def updates(self, batches: int) -> int:
        """Own updates made from ``batches`` batches, for schedules."""
        return batches

    def resolved(self, spec: EnvSpec, device: torch.device) -> LearnerConfig:
        """This config with every ``auto`` replaced for this world and device."""
        return self

    def adapted(self, strategy: Any) -> Any:
        """``strategy`` with hyper-parameters that follow from this config's, where the user gave none."""
        return strategy

    def vector_bytes(self, spec: EnvSpec) -> int | None:
        """Bytes of all replicas' vectors; None: a run counts them by building the learner on torch's ``meta``
        device, where tensors have sizes and no memory."""
        return None

    def build(self, context: Context) -> Any:
        """The ``Learner`` of one replica; an ``Agent`` if its world is made of env steps.

        Raises ValueError for invalid hyper-parameters.
        """
        ...


def updates_of(learner: Learner) -> int:
    """Own updates so far; if there are several replicas, the maximum. A learner may list in ``counted`` the
    replicas whose updates count, for example without a model that is fitted only now and then."""
    counted = getattr(learner, "counted", None)
    return max(replica.clock for name, replica in learner.replicas.items() if not counted or name in counted)
