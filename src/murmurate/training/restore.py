"""Rebuild a learner from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.training import checkpoint
from murmurate.training.data_record import read_fingerprint
from murmurate.training.run import Run


def load_agent(run: Run, folder: Path) -> Any:
    """The learner (an agent, where it acts) with the consensus parameters of a checkpoint folder
    (``checkpoints/last``, say).

    Floating-point buffers are the mean over the replicas saved in it. A data set is not read: the run
    folder stores its spec. Raises Refusal if the checkpoint is damaged.
    """
    torch.set_num_threads(run.placement.threads)
    spec = run.world.spec(read_fingerprint(run_folder(folder)))
    agent = run.learner.build(Context(spec, Replica, run.seed))
    states = [checkpoint.read_part(folder, rank) for rank in learners(run, folder)]
    # the part saved last has the newest state of the others
    latest = max(states, key=lambda state: state["seconds"])
    if (centre := run.replicas) in checkpoint.parts(folder):
        latest = checkpoint.read_part(folder, centre)
    for name, replica in agent.replicas.items():
        with torch.no_grad():
            for key, values in replica.named_views():
                values.copy_(latest["consensus"][name]["params"][key])
            for key, buffer in replica.module.named_buffers():
                saved = [s["replicas"][name]["replica"]["buffers"][key] for s in states]
                mean = torch.stack(saved).mean(0) if buffer.is_floating_point() else saved[0]
                buffer.copy_(mean)
        replica.reload()
    return agent


def run_folder(checkpoint_folder: Path) -> Path:
    """The run folder of a checkpoint folder."""
    return checkpoint_folder.absolute().parents[1]


def learners(run: Run, folder: Path) -> list[int]:
    """Ranks of the replicas whose parts are in a checkpoint; a centre's part is not among them."""
    return [rank for rank in checkpoint.parts(folder) if rank < run.replicas]
