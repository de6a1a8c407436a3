"""The entry point of a worker: a replica's training loop, or the centre's server."""

from __future__ import annotations

from murmurate.training.centre_server import CentreServer
from murmurate.training.data_record import check_data
from murmurate.training.loop import TrainingLoop
from murmurate.training.run import Run
from murmurate.training.worker_context import WorkerContext


def work(run: Run, context: WorkerContext) -> None:
    """Do the work of rank ``context.rank``, from start to end.

    Raises Refusal if this process reads another data set than the run started with, as far as that can be
    detected without reading all of it.
    """
    check_data(context.folder, run.world, thorough=False)
    member_of(run, context).run_to_end()


def member_of(run: Run, context: WorkerContext) -> TrainingLoop | CentreServer:
    """What executes a rank: ranks below ``run.replicas`` train, and the next rank is the centre."""
    return TrainingLoop(run, context) if context.rank < run.replicas else CentreServer(run, context)
