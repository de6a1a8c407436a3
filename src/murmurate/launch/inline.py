"""The inline launcher: a whole run in this process."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from murmurate.errors import RunFailed
from murmurate.fabric.interface import Fabric, FabricError
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.simulated.coroutines import CoroutineKind
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.launch.role import fix_arithmetic
from murmurate.replica.clipping import NotFinite
from murmurate.spec import derive_seed
from murmurate.training.coordinator import Coordinator
from murmurate.training.interrupts import SecondInterrupt, signals
from murmurate.training.launcher import Launcher
from murmurate.training.run import Run
from murmurate.training.run_folder import write_roles
from murmurate.training.worker import work
from murmurate.training.worker_context import Resume, WorkerContext

_POLL_STEPS = 20


class Inline(Launcher):
    """All roles as coroutines of this process, on a simulated fabric: repeatable asynchrony.

    The coroutines are greenlets, or threads where collectives are differentiated (see ``coroutines``).

    One coroutine runs at a time, and the run's seed determines which is next at each call of the fabric. So a
    repeated run gives the same parameters, even with an asynchronous strategy, unless the run is limited by
    minutes or by a target return. To keep this, checkpoints are made by env steps alone, not by time. This
    launcher is for tests, for debugging with breakpoints, and for systems that allow no other processes; it
    is slower than ``local`` on more than one core.
    """

    name = "inline"
    one_process = True

    def start(self, run: Run, folder: Path, resume: Resume | None) -> Coordinator:
        run_state = RunState(run.members)
        run_state.open()
        if resume is not None:
            run_state.set_counts(resume.counts())
        started_at = time.monotonic()
        coordinator = Coordinator(run, folder, run_state, started_at, resume, in_process=True)
        write_roles(folder, dict.fromkeys(range(run.members)), run.replicas)
        seed = derive_seed(run.seed, "schedule") % 2**32
        kind: CoroutineKind = "threads" if run.learner.collectives_in_backward else "greenlets"
        fabric = SimulatedFabric(
            run.members, seed, keep_log=False, coroutines=kind, has_finished=run_state.has_finished
        )
        # polled by steps, not by seconds, so that the step at which a checkpoint is requested is repeatable
        poll = _every(_POLL_STEPS, coordinator.poll)

        def role(rank: int, member_fabric: Fabric) -> None:
            context = WorkerContext(
                rank,
                member_fabric,
                run_state,
                folder,
                started_at,
                coordinator.seconds_before,
                # in no variable, as the loop releases it: it may hold a replay
                None if resume is None else resume.part(rank),
                between_steps=poll,
            )
            # as in a worker's own process: how sums are rounded depends on the number of threads
            fix_arithmetic(run.placement.threads)
            try:
                work(run, context)
            except (NotFinite, FabricError) as failure:
                raise coordinator.failed(rank, str(failure)) from failure

        try:
            # the caller's generators go on as if there had been no run
            gpus = [device for rank in range(run.replicas) if (device := run.device(rank)).type == "cuda"]
            with signals(coordinator), coordinator.console, torch.random.fork_rng(devices=gpus):
                fabric.run([functools.partial(role, rank) for rank in range(run.members)])
                coordinator.poll()
                coordinator.commit_final()
        except (RunFailed, SecondInterrupt) as failure:
            coordinator.failure = failure
        except FabricError as failure:
            coordinator.failure = RunFailed(str(failure))
        finally:
            coordinator.close()
        return coordinator


def _every(calls: int, act: Callable[[], None]) -> Callable[[], None]:
    """A function that calls ``act`` at every ``calls``-th call."""
    calls_made = itertools.count(1)

    def count_and_act() -> None:
        if next(calls_made) % calls == 0:
            act()

    return count_and_act
