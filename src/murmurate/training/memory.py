"""The memory that a run needs, compared with what there is before any of it is taken."""

from __future__ import annotations

import contextlib
import operator

import torch

from murmurate.errors import Refusal
from murmurate.fabric.processes.memory_limits import (
    FEWER_OR_SMALLER,
    PROCESS_BYTES,
    memory_text,
    refuse_if_small,
)
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, Learner
from murmurate.training.run import Run

# by option, where a run has its value
_SOURCE_OPTIONS = {
    "simulators": "source.simulators",
    "capacity": "source.capacity",
    "replay.capacity": "source.replay.capacity",
    "rollouts.starts": "source.rollouts.starts",
    "actors": "source.actors",
    "agent.batch": "learner.batch",
    "agent.policy.batch": "learner.policy.batch",
}


def refuse_too_small(run: Run, vector_bytes: int) -> None:
    """Raise Refusal if there is too little memory for the sources and for replicas with vectors of
    ``vector_bytes`` bytes."""
    source_bytes, all_bytes = run.source.memory_bytes(run), needed_bytes(run, vector_bytes)
    sources_note = (
        f" (sources take {memory_text(run.replicas * source_bytes)} of it{_source_options(run)})"
        if source_bytes > 2**20
        else ""
    )
    mostly_sources = 2 * run.replicas * source_bytes > all_bytes
    refuse_if_small(
        all_bytes,
        f"{run.recipe} with {run.replicas} replica(s){sources_note}",
        (16 + 6 * (run.members - 1)) * vector_bytes + source_bytes,
        "smaller values of these options" if mostly_sources else FEWER_OR_SMALLER,
    )


def _source_options(run: Run) -> str:
    """The options of this run on which the memory of its sources depends, with values, after a colon."""
    options = []
    for option, path in _SOURCE_OPTIONS.items():
        with contextlib.suppress(AttributeError):  # other sources or learners have it
            options.append(f"--{option} {operator.attrgetter(path)(run)}")
    on_disk = ", or --replay.folder FOLDER on a disk" if hasattr(run.source, "replay") else ""
    return ": " + ", ".join(options) + on_disk if options else ""


def needed_bytes(run: Run, vector_bytes: int) -> int:
    """The memory of all replicas and their sources, for vectors of ``vector_bytes`` bytes."""
    # per replica: its process, optimizer state, and, in each of two registers, at most three slots, which all
    # processes map; per further part: its process, vector, gradient and slots of messages
    further_parts = run.grid[0] * run.grid[1] - 1
    parts_bytes = further_parts * (PROCESS_BYTES + 6 * vector_bytes)
    own_bytes = PROCESS_BYTES + 16 * vector_bytes + run.source.memory_bytes(run)
    return int(run.replicas * (own_bytes + parts_bytes))


def planned_bytes(run: Run) -> int | None:
    """Bytes of the learner's vectors, found without allocating them; None if that is not possible."""
    spec, meta = run.world.spec(), torch.device("meta")
    planned = run.learner.vector_bytes(spec)
    if planned is not None:
        return planned
    try:
        with meta:
            return bytes_of(run.learner.build(Context(spec, Replica, run.seed, meta)))
    except Refusal:
        raise
    except Exception as error:  # some code needs real values: building on a real device says what is wrong
        if exceeds_memory(error):
            raise too_large(run, error) from error
        return None


def bytes_of(learner: Learner) -> int:
    """Bytes of the learner's vectors."""
    return sum(replica.params.nbytes for replica in learner.replicas.values())


def exceeds_memory(error: Exception) -> bool:
    """Whether torch or numpy had too little memory, or could not even compute how much they need."""
    words = ("overflow", "allocate", "not enough memory", "dimension is too large")
    says_so = isinstance(error, (RuntimeError, ValueError)) and any(
        word in str(error).lower() for word in words
    )
    return says_so or isinstance(error, (MemoryError, OverflowError))


def too_large(run: Run, error: Exception) -> Refusal:
    cause = (str(error).splitlines() or ["out of memory"])[0]
    return Refusal(f"{run.recipe} does not fit in memory ({cause}). Use a smaller network or batch.")
