"""Building a member's learner and its source of batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from murmurate.datasets.interface import DataSet
from murmurate.errors import Refusal
from murmurate.fabric.interface import Channel, Fabric
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.collectives import Group
from murmurate.replicator.gather import TensorExchange
from murmurate.replicator.learner import Context, Replicate, updates_of
from murmurate.replicator.replicator import Replicator
from murmurate.sources.interface import Source, SourceContext
from murmurate.training.run import Run


def build_learner(
    run: Run,
    rank: int,
    replicate: Replicate,
    open_group: Callable[[], Group] | None = None,
    *,
    with_examples: bool = True,
    heartbeat: Callable[[], None] = lambda: None,
) -> Any:
    """The learner of one replica, or of the centre, which has the same parameter vectors.

    with_examples: whether a learner of examples gets the data set. heartbeat: see ``Context``.
    """
    own = planned = run.planned_updates()
    if planned is not None and run.strategy.counts_all:
        planned *= run.replicas
    examples = validation = None
    averaged = run.replicas if run.strategy.averages_gradients else 1
    identical = averaged > 1 and open_group is not None
    if with_examples and run.learner.requires.kind == "examples":
        split = cast(DataSet, run.world).divided()
        examples, validation = split.train, split.validation if rank == 0 or identical else None
    context = Context(
        spec=run.world.spec(),
        replicate=replicate,
        seed=run.seed,
        device=run.device(rank),
        updates=planned,
        own_updates=own,
        examples=examples,
        validation=validation,
        averaged=averaged,
        identical=identical,
        open_group=open_group,
        rank=rank,
        heartbeat=heartbeat,
    )
    return run.learner.build(context)


def learner_of(
    run: Run,
    rank: int,
    replicator: Replicator,
    replicate: Replicate | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> Any:
    """Like ``build_learner``, with collectives among the replicas if these wait for one another.

    replicate: used instead of the replicator's ``replicate``. heartbeat: see ``Context``.
    """
    open_group = group_opener(run, replicator.fabric, range(run.replicas))
    return build_learner(run, rank, replicate or replicator.replicate, open_group, heartbeat=heartbeat)


def group_opener(run: Run, fabric: Fabric, members: Sequence[int]) -> Callable[[], Group]:
    """``Context.open_group`` for these members of the fabric: the same group for every part of a learner."""

    @functools.cache
    def open_group() -> Group:
        if not run.strategy.common_rounds:
            raise Refusal(
                "this learner needs collectives among its replicas, and they do not wait for one another "
                "under this strategy. Use --strategy all-reduce or local-sgd."
            )
        return Group(TensorExchange(fabric, members))

    return open_group


def open_only_source(run: Run, learner: Any) -> Source:
    """The source of a run with one learner: it needs no channels to others."""
    return open_source(run, 0, learner, SimulatedFabric(1, seed=0, keep_log=False).member(0))


def open_source(run: Run, rank: int, learner: Any, fabric: Fabric) -> Source:
    """Open the source of one replica. fabric: opens channels among the sources of several learners."""
    planned = run.planned_updates()

    def progress() -> float:
        return 0.0 if planned is None else min(updates_of(learner) / planned, 1.0)

    def channel(name: str, like: Tensor) -> Channel:
        return fabric.channel(name, like, members=range(run.replicas))

    simulators = run.replicas * getattr(run.source, "simulators", 1)
    run_of_source = dataclasses.replace(run, world=run.world.shared_by(simulators))
    address = getattr(fabric, "address", "")  # only a fabric between hosts has one
    return run.source.open(SourceContext(run_of_source, rank, learner, progress, channel, address))
