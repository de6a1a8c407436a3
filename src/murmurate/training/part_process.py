"""The program of a part's process: it learns from every batch that part 0 of its replica learns from."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading

import torch

from murmurate.errors import Refusal
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import take_signals
from murmurate.replica.vector import Replica
from murmurate.replicator.collectives import Group
from murmurate.spatial import PartLost
from murmurate.spec import Batch
from murmurate.training.members import build_learner
from murmurate.training.part_processes import LeaderAlone, PartSettings, PartsOfReplica, write_refusal


def learn_along(settings: PartSettings) -> None:
    """Learn from the batches of part 0 until this process is ended."""
    run = settings.run
    torch.set_num_threads(run.placement.threads)
    torch.set_flush_denormal(True)
    memory_file = SharedMemoryFile(settings.memory)
    replica_parts = PartsOfReplica(run, settings.rank, settings.part, memory_file)
    replicate = functools.partial(replica_parts.replicate, Replica)
    learner = build_learner(
        run, settings.rank, replicate, open_group=lambda: Group(LeaderAlone()), with_examples=False
    )
    while True:
        learner.learn(Batch(replica_parts.receive()))


def _exit_with_part_0() -> None:
    # returns when part 0's end is closed, however part 0 exits; the lock of the buffered file stays free,
    # which the interpreter needs to shut down if this process fails
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


if __name__ == "__main__":
    # a scheduler may send SIGTERM to all processes of a job; part 0 ends this one after the final checkpoint
    take_signals(signal.SIG_IGN)
    sys.path[:] = pickle.load(sys.stdin.buffer)
    part_settings: PartSettings = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_part_0, daemon=True).start()
    try:
        learn_along(part_settings)
    except (PartLost, Refusal) as error:  # part 0 raises it too, or notices that this part ends
        print(f"murmurate: {error}", file=sys.stderr, flush=True)
        if isinstance(error, Refusal):
            write_refusal(part_settings.refusals, error)
        os._exit(1)
