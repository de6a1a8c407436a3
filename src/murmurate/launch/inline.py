"""All roles as threads of this process, on a simulated fabric: repeatable asynchrony from the run's seed.

One thread runs at a time, and the schedule seed picks who is next at each fabric call, so even an
asynchronous strategy gives the same parameters twice, unless minutes or a return end the run: both depend
on the clock. For tests, for debugging with breakpoints, and
where processes are not allowed; slower than ``local`` on more than one core.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from murmurate.errors import RunFailed
from murmurate.fabric.interface import Capability, Fabric, FabricError
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.clipping import NotFinite
from murmurate.spec import derive_seed
from murmurate.training.centre_server import member
from murmurate.training.coordinator import Coordinator, SecondInterrupt, signals
from murmurate.training.run import Run
from murmurate.training.run_folder import write_roles
from murmurate.training.worker import Post, Restored

CAPABILITIES = frozenset(Capability)
_POLL_STEPS = 20


def start(
    run: Run,
    folder: Path,
    *,
    offset_seconds: float = 0.0,
    manifest: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
    parts: dict[int, int] | None = None,
) -> Coordinator:
    """Run the roles to their end (see ``murmurate.launch.local.start``)."""
    run_state = RunState(run.members)
    run_state.open()
    started_at = time.monotonic()
    coordinator = Coordinator(run, folder, run_state, started_at, offset_seconds)
    if manifest is not None:
        coordinator.restore(manifest)
        coordinator.event("resumed", f"resumed at {manifest['env_steps']:,} env steps")
    write_roles(folder, dict.fromkeys(range(run.members)), run.replicas)
    fabric = SimulatedFabric(run.members, derive_seed(run.seed, "schedule") % 2**32, keep_log=False)
    # counted in steps, not in seconds: when a checkpoint is asked for is then repeatable too
    poll = _every(_POLL_STEPS, coordinator.poll)

    def role(rank: int, door: Fabric) -> None:
        restored = None
        if checkpoint is not None and parts is not None:
            restored = Restored.read(checkpoint, rank, parts[rank])
        post = Post(rank, door, run_state, folder, started_at, offset_seconds, restored, between=poll)
        # as in a role's own process; and with more threads the first sums of a process differ from later ones
        torch.set_num_threads(run.placement.threads)
        torch.set_flush_denormal(True)
        try:
            member(run, post).go()
        except (NotFinite, FabricError) as failure:
            raise RunFailed(f"replica {rank}: {failure}") from failure

    try:
        with signals(coordinator), coordinator.console:
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
    """``act`` at every so many calls."""
    turn = itertools.count(1)

    def maybe() -> None:
        if next(turn) % calls == 0:
            act()

    return maybe
