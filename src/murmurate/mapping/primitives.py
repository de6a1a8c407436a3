"""The primitives of a training run (Zhang 2022, section 4.1.1 and Fig. 4.1), and the dataflow graph they
form.

They divide those of the thesis: its actor into ``act`` and ``simulate``, its replay management module into
``sample`` and ``priority``, its data storage into ``insert`` and ``gather``, and its learner into
``forward``, ``backward``, ``update`` and ``exchange``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from murmurate.mapping.exchange import bytes_for_each_parameter
from murmurate.sources.interface import BatchShape
from murmurate.training.run import Run

Size = Literal["simulators", "batch", "none"]
FLOAT_BYTES = 4
_LEARNERS_OF_A_GPU = 4  # each has a CUDA context, which takes about half a GB


@dataclass(frozen=True)
class Primitive:
    """A kind of work that is measured, predicted and placed as a whole.

    size: what its time grows with: the simulators that step together, the rows of a batch, or neither. role:
    the process that does the work if actors and learner are separate processes.
    """

    name: str
    size: Size
    role: Literal["actor", "learner"]
    about: str


PRIMITIVES: dict[str, Primitive] = {
    p.name: p
    for p in (
        Primitive("act", "simulators", "actor", "actions of the policy for all simulators"),
        Primitive("simulate", "simulators", "actor", "one step of all simulators"),
        Primitive("collect", "simulators", "actor", "bookkeeping of a step; reading and augmenting examples"),
        Primitive("insert", "simulators", "learner", "writing a step to the replay, with its priority"),
        Primitive("sample", "batch", "learner", "drawing the indices of a batch by priority"),
        Primitive("gather", "batch", "learner", "reading the rows of a batch from the replay's storage"),
        Primitive("forward", "batch", "learner", "losses of a batch"),
        Primitive("backward", "batch", "learner", "gradients of the losses"),
        Primitive("update", "none", "learner", "clipping and optimizer step"),
        Primitive("priority", "batch", "learner", "writing the new priorities of a batch"),
        Primitive("loop", "none", "learner", "counting, recording and heartbeats of an iteration"),
        Primitive("fit", "none", "learner", "a gradient step of a model, with its share of the fit's rest"),
        Primitive("imagine", "none", "learner", "one step of all rollouts of a round, and storing it"),
    )
}
# primitives that run once for each step of the simulators
PER_STEP = ("act", "simulate", "collect", "insert")
# primitives of a model, which run after many batches, often; all others run once for each batch
OF_MODEL = ("fit", "imagine")


def role_of(work: str) -> str:
    """The role of a primitive, or of what else a learner does: ``exchange``, ``waiting`` and ``handover``."""
    return PRIMITIVES[work].role if work in PRIMITIVES else "learner"


def size_of(shape: BatchShape, primitive: str) -> int:
    """The size with which the time of a primitive grows, in this shape."""
    size = PRIMITIVES[primitive].size
    if size == "batch":
        return shape.rows
    return 0 if size == "none" else max(1, shape.simulators // shape.groups)


def calls(shape: BatchShape, primitive: str) -> float:
    """How often a primitive runs for each batch of a learner, over all its groups."""
    of_model = {"fit": shape.fit_steps, "imagine": shape.rollout_steps}
    return shape.steps * shape.groups if primitive in PER_STEP else of_model.get(primitive, 1.0)


def shape_of(run: Run) -> BatchShape | None:
    """The shape of ``run``'s batches; None if they are not modelled."""
    return run.source.batch_shape(run)


def records_of(run: Run, shape: BatchShape) -> float:
    """How many records a learner reads from its actors for each batch: a record is a step of all simulators
    of an actor, or a trajectory of such steps."""
    requires: Any = run.learner.requires
    return shape.steps * shape.groups / (requires.steps if requires.kind == "rollouts" else 1)


def producers(run: Run) -> int:
    """Number of processes of each learner that make what it learns from: actors, or decoders of images."""
    return run.source.acting_processes() + run.source.decoding_processes(run)


def on_cpu(run: Run) -> bool:
    """Whether all learners of ``run`` are on the CPU."""
    return all(torch.device(name).type == "cpu" for name in run.placement.devices)


def computing_threads(run: Run) -> int:
    """Number of threads that compute in ``run``. Those of its placement are the learners'; actors and
    decoders have one each. A centre has none: it mostly waits, and what it does is part of the exchange."""
    return run.replicas * (run.placement.threads + producers(run))


def most_processes(run: Run, cores: int) -> int:
    """Number of learners that keep the cores, or the GPUs, of ``run``'s placement busy."""
    most = max(1, cores // run.placement.threads)
    return most if on_cpu(run) else min(most, _LEARNERS_OF_A_GPU * len(run.placement.devices))


@dataclass(frozen=True)
class Edge:
    """Data that one primitive passes to another. bytes: bytes for each batch."""

    start: str
    end: str
    bytes: float


def edges(run: Run, parameters: int, updated: float | None = None) -> Iterator[Edge]:
    """The dataflow of one replica: which primitive passes data to which, and how much for each batch.

    parameters: N, the number of the learner's parameters. updated: how many of them the updates from a batch
    change in total; by default all in each update. ``exchange`` reads and writes what the metric
    ``bytes_exchanged`` counts in shared memory.
    """
    if updated is None:
        updated = float(parameters * run.learner.updates(1))
    shape, spec = shape_of(run), run.world.spec()
    assert shape is not None
    observation = math.prod(spec.observation_shape) * spec.observation_dtype.itemsize
    if run.learner.requires.kind == "examples":
        source: Any = run.source
        example = source.example_bytes(run) if hasattr(source, "example_bytes") else observation
        yield Edge("collect", "forward", float(example * shape.rows))
        yield from _learning_edges(run, updated)
        return
    action = 8 if spec.actions else FLOAT_BYTES * math.prod(spec.action_shape)
    step = observation + action + FLOAT_BYTES + 2  # a reward, terminated and truncated
    yield Edge("simulate", "act", shape.env_steps * observation)
    yield Edge("act", "simulate", shape.env_steps * action)
    requires: Any = run.learner.requires
    if requires.kind == "transitions":
        row = 2 * observation + action + 2 * FLOAT_BYTES  # a reward and a discount
        yield Edge("simulate", "insert", shape.env_steps * step)
        yield Edge("sample", "gather", 8.0 * shape.rows)  # an int64 index
        yield Edge("gather", "forward", float(row * shape.rows))
        yield Edge("forward", "priority", 12.0 * shape.rows)  # with a float32 priority
        yield Edge("priority", "sample", 0.0)
    elif requires.kind == "sequences":
        observations = 1 + (requires.steps if requires.every else 1)  # that after the last step, too
        yield Edge("simulate", "insert", shape.env_steps * step)
        row = observations * observation + requires.steps * (step - observation)
        yield Edge("gather", "forward", float(row * shape.rows))
    elif requires.kind == "model":
        source = run.source
        row = 2 * observation + action + 2 * FLOAT_BYTES
        yield Edge("simulate", "insert", shape.env_steps * step)
        yield Edge("insert", "fit", 0.0)  # the same rows in every epoch
        yield Edge("fit", "imagine", 0.0)
        yield Edge("imagine", "gather", float(row * source.rollouts.starts * shape.rollout_steps))
        yield Edge("gather", "forward", float(row * shape.rows))
    else:
        yield Edge("simulate", "forward", shape.env_steps * step)
    yield Edge("update", "act", float(FLOAT_BYTES * parameters))
    yield from _learning_edges(run, updated)


def _learning_edges(run: Run, updated: float) -> Iterator[Edge]:
    yield Edge("forward", "backward", 0.0)
    yield Edge("backward", "update", FLOAT_BYTES * updated)
    if run.replicas > 1:
        yield Edge("update", "exchange", bytes_for_each_parameter(run.strategy, run.replicas) * updated)
