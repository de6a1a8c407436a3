"""What a launcher gives to a member of a run, what the member resumes from, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from murmurate.fabric.interface import Fabric
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.record.recorder import Recorder
from murmurate.replica.clipping import NotFinite
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import FINAL_DRAIN
from murmurate.training.checkpoint import env_steps, read_manifest, read_part, read_replays, updates
from murmurate.training.rejoin import StateTransfer
from murmurate.training.run import Run

FINAL = "final"  # name of the final checkpoint's staging folder
FINAL_REQUEST = FINAL_DRAIN  # number of its request
# synchronous members stop and save after so many batches at the latest, if their rounds take more
BATCHES_TO_DECISION = 100
DRAIN_SECONDS = 10.0  # how long members wait for deltas in flight before a checkpoint, at least


def drain_seconds(run_state: RunState) -> float:
    """The longest wait for deltas in flight before a checkpoint: members send their last ones between two
    batches, so some may send them a batch later than others."""
    return max(DRAIN_SECONDS, 2 * run_state.longest_pace())


def seconds_to_decision(run: Run, run_state: RunState) -> float:
    """How long a member may go on learning until it answers a request to stop or save: for a batch or, where
    members decide together, for a round."""
    batches = run.strategy.updates_per_round if run.strategy.synchronous else 1
    return min(batches, BATCHES_TO_DECISION) * run_state.longest_pace()


@dataclass
class Restored:
    """What a replica resumes from: its own part of a checkpoint or, if it had died, that of a living replica
    (``is_own`` is False), but with its own count of env steps, and with new episodes."""

    state: dict[str, Any]
    env_steps: int
    is_own: bool

    @classmethod
    def read(cls, checkpoint: Path, rank: int, part_rank: int) -> Restored:
        """What replica ``rank`` resumes from: the part of replica ``part_rank``. Raises Refusal if a file is
        unreadable."""
        state = read_part(checkpoint, part_rank)
        if rank == part_rank and "source" in state:
            state["source"]["replays"] = read_replays(checkpoint, rank)
        counts = read_manifest(checkpoint).get("replica_env_steps")
        count = state["env_steps"] if rank == part_rank or counts is None else counts[rank]
        return cls(state, int(count), rank == part_rank)


def parts_to_resume(saved: Sequence[int], replicas: int) -> dict[int, int]:
    """By rank, the member whose part of a checkpoint each member resumes from: its own or, for a replica that
    had died, that of the next replica that has one (after the last, the first).

    Where replicas share a vector (DPSGD), the living one of the lowest rank leads, and the shared state is
    restored from what the one of the lowest rank resumes from. So if that one had died, this is the part of
    the one that led after it.

    saved: ascending ranks of the members that have a part.
    """
    learners = [rank for rank in saved if rank < replicas]
    parts = {rank: next((r for r in learners if r >= rank), learners[0]) for rank in range(replicas)}
    return parts | {rank: rank for rank in saved if rank >= replicas}


@dataclass(frozen=True)
class Resume:
    """What a resumed run starts from.

    parts: rank -> the replica whose part of ``checkpoint`` it takes. manifest: the checkpoint's
    ``state.json``. offset_seconds: run time before the resume.
    """

    checkpoint: Path
    parts: dict[int, int]
    manifest: dict[str, Any]
    offset_seconds: float

    def part(self, rank: int) -> Restored:
        return Restored.read(self.checkpoint, rank, self.parts[rank])

    def counts(self) -> list[tuple[int, int]]:
        """Env steps and updates of each replica, by rank, at which it goes on. Raises Refusal if a part is
        unreadable."""
        saved = self.manifest.get("replica_env_steps")
        return [
            (
                env_steps(self.checkpoint, self.parts[rank]) if saved is None else int(saved[rank]),
                updates(self.checkpoint, self.parts[rank]),
            )
            for rank in range(self.manifest["replicas"])
        ]


@dataclass
class WorkerContext:
    """What a launcher gives to one member: fabric, run state, run folder, and what to resume from.

    started_at: ``time.monotonic()`` in the launcher when the run began or was resumed. offset_seconds: run
    time before the resume.
    between_steps: called between two steps, and while a source prepares a batch. admission: the fabric again,
    if it supports state transfers. joins: this process replaces one that died, and begins with a state
    transfer.
    """

    rank: int
    fabric: Fabric
    run_state: RunState
    folder: Path
    started_at: float
    offset_seconds: float = 0.0
    restored: Restored | None = None
    between_steps: Callable[[], None] = lambda: None
    admission: ProcessFabric | None = None
    joins: bool = False

    def recorder(self, rank: int | None) -> Recorder:
        """Records what the replica ``rank`` does; None for a centre."""
        path = self.folder / "metrics.jsonl"
        return Recorder(path, rank, self.started_at, offset_seconds=self.offset_seconds)

    def state_transfer(self, replicator: Replicator) -> StateTransfer | None:
        return None if self.admission is None else StateTransfer(self.admission, replicator, self.folder)


def member_state(replicator: Replicator, seconds: float) -> dict[str, Any]:
    """The part of a checkpoint that replicas and the centre have in common.

    Raises NotFinite for parameters that are not finite, so that a good checkpoint is not replaced.
    """
    for name, bound in replicator.bound_replicas.items():
        # a copy: isfinite reads twice, and would report NaN on a vector that others write concurrently
        if not torch.isfinite(bound.replica.values().detach().clone()).all():
            raise NotFinite(
                f"the parameters of replica '{name}' are not finite at its update {bound.replica.clock}. "
                "A smaller learning rate usually helps."
            )
    consensus = {
        name: {"params": dict(replicator.bound_replicas[name].replica.named_views(vector))}
        for name, vector in replicator.consensus().items()
    }
    return {
        "replicas": replicator.state(),
        "consensus": consensus,
        "seconds": seconds,
        "staleness_max": {name: bound.staleness_max for name, bound in replicator.bound_replicas.items()},
        "bytes_exchanged": replicator.bytes_exchanged,
        "waiting_seconds": replicator.waiting_seconds,
        "refused": replicator.refused,
    }


def restore_counts(replicator: Replicator, state: dict[str, Any]) -> None:
    """Restore the counts in this member's ``member_state``, after its strategies have loaded."""
    for name, bound in replicator.bound_replicas.items():
        bound.staleness_max = int(state["staleness_max"][name])
    traffic = next(iter(replicator.bound_replicas.values())).channel.traffic
    traffic.bytes = int(state["bytes_exchanged"])
    traffic.waiting_seconds = float(state["waiting_seconds"])
    # strategies restore their own count of refused messages
    traffic.refused = max(0, int(state.get("refused", 0)) - replicator.refused)


def staging(folder: Path, name: str) -> Path:
    """The folder that collects the parts of a checkpoint before it is committed."""
    return folder / "checkpoints" / f".staging-{name}"
