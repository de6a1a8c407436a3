"""Who was trained, from a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from murmurate.datasets.table_world import TableWorld
from murmurate.replica.vector import Replica
from murmurate.sources.examples import CorpusWorld
from murmurate.spec import EnvSpec
from murmurate.training import checkpoint
from murmurate.training.data_record import read_record
from murmurate.training.run import Run
from murmurate.worlds.interface import ExampleWorld, World, spec_of


def load_agent(run: Run, folder: Path) -> Any:
    """An agent, or a learner where nobody acts, with the consensus parameters of a checkpoint folder
    (``checkpoints/last``, say).

    Floating-point buffers are the mean over the replicas saved in it. A corpus or table is not looked at:
    what is to be known of it is in the run folder. Raises Refusal if the checkpoint is damaged.
    """
    torch.set_num_threads(run.placement.threads)
    spec = _spec(run.world, run_folder(folder))
    agent = run.agent.build(spec, Replica, seed=run.seed, device=torch.device("cpu"))
    states = [checkpoint.read_part(folder, rank) for rank in learners(run, folder)]
    latest = max(states, key=lambda state: state["seconds"])  # who saved last saw most of the others
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
    """The run folder that a checkpoint folder lies in."""
    return checkpoint_folder.absolute().parents[1]


def learners(run: Run, folder: Path) -> list[int]:
    """Ranks of the replicas whose parts are in a checkpoint; a centre's part is not among them."""
    return [rank for rank in checkpoint.parts(folder) if rank < run.replicas]


def _spec(world: World | ExampleWorld, folder: Path) -> EnvSpec:
    if isinstance(world, CorpusWorld):
        return read_record(folder, world).spec(world)
    if isinstance(world, TableWorld):
        return read_record(folder, world).spec(world)
    return spec_of(world)
