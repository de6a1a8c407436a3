"""Where a member of a run works, what it goes on from, and what it leaves in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from murmurate.fabric.interface import Fabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.replica.clipping import NotFinite
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import LAST_CUT
from murmurate.training.checkpoint import read_manifest, read_part, read_replay
from murmurate.training.rejoin import Admission

FINAL = "final"
FINAL_REQUEST = LAST_CUT
SETTLE_SECONDS = 10.0  # for deltas in flight to arrive before a checkpoint


@dataclass
class Restored:
    """What a replica goes on from. One that had died goes on from a living one's learning (``own`` is
    False), with its own count of env steps and with games of its own."""

    state: dict[str, Any]
    env_steps: int
    own: bool

    @classmethod
    def read(cls, checkpoint: Path, rank: int, source: int) -> Restored:
        """Replica ``rank``, from the part of replica ``source``. Raises Refusal if it is unreadable."""
        state = read_part(checkpoint, source)
        if rank == source and "source" in state:
            state["source"]["replay"] = read_replay(checkpoint, rank)
        counts = read_manifest(checkpoint).get("replica_env_steps")
        count = state["env_steps"] if rank == source or counts is None else counts[rank]
        return cls(state, int(count), rank == source)


@dataclass
class Post:
    """Where one replica works: its fabric, the run state, the run folder, and what to go on from.

    admission: the fabric again, where members may be started again: ``joins`` says that this one was.
    """

    rank: int
    fabric: Fabric
    run_state: RunState
    folder: Path
    started_at: float
    offset_seconds: float = 0.0
    restored: Restored | None = None
    between: Callable[[], None] = lambda: None  # called between two steps
    admission: Admission | None = None
    joins: bool = False


def member_state(replicator: Replicator, seconds: float) -> dict[str, Any]:
    """What a checkpoint holds of a replica or a centre alike.

    Raises NotFinite rather than let a good checkpoint be replaced by one that cannot learn.
    """
    for name, bond in replicator.bonds.items():
        # a copy: isfinite reads twice, and on a vector that others write at this moment it finds x != x
        if not torch.isfinite(bond.replica.values().detach().clone()).all():
            raise NotFinite(
                f"the parameters of replica '{name}' are not finite at its update {bond.replica.clock}. "
                "A smaller learning rate usually helps."
            )
    consensus = {
        name: {"params": dict(replicator.bonds[name].replica.named_views(vector))}
        for name, vector in replicator.consensus().items()
    }
    return {
        "replicas": replicator.state(),
        "consensus": consensus,
        "seconds": seconds,
        "staleness_max": {name: bond.staleness_max for name, bond in replicator.bonds.items()},
        "bytes_exchanged": replicator.bytes_exchanged,
        "waiting_seconds": replicator.waiting_seconds,
        "refused": replicator.refused,
    }


def restore_counts(replicator: Replicator, state: dict[str, Any]) -> None:
    """Go on from what ``member_state`` counted of this same member, whose strategies have loaded."""
    for name, bond in replicator.bonds.items():
        bond.staleness_max = int(state["staleness_max"][name])
    traffic = next(iter(replicator.bonds.values())).channel.traffic
    traffic.bytes = int(state["bytes_exchanged"])
    traffic.waiting_seconds = float(state["waiting_seconds"])
    # what strategies refused is theirs to remember
    traffic.refused = max(0, int(state.get("refused", 0)) - replicator.refused)


def staging(folder: Path, name: str) -> Path:
    """Where the parts of a checkpoint gather before it is committed."""
    return folder / "checkpoints" / f".staging-{name}"
