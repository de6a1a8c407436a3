"""A user's own script as threads of this process, one of which runs at a time, on a simulated fabric."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Fabric
from murmurate.fabric.processes.spawn import Exit
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.launch.script_launcher import ScriptLauncher
from murmurate.launch.script_member import ByThread, ScriptSettings, ended, failure, stdout_of
from murmurate.training.threads import keeping_threads


class InlineScripts(ScriptLauncher):
    """Threads of this process, in an order drawn from the seed."""

    name = "inline"

    def run(self, settings: ScriptSettings) -> list[Any]:
        return run_in_threads(settings, settings.seed)


def run_in_threads(settings: ScriptSettings, seed: int) -> list[Any]:
    """Run the members as threads of this process, one at a time, and return the results of the replicas, by
    rank. seed: of the order in which they take turns. Raises as ``murmurate.run`` says."""
    fabric = SimulatedFabric(settings.members, seed, keep_log=False, coroutines="threads")
    out = ByThread(sys.stdout)
    streams = [stdout_of(settings.output, rank) for rank in range(settings.members)]

    def run_member(fabric: Fabric) -> Any:
        out.streams[threading.get_ident()] = streams[fabric.rank]
        try:
            with ended(streams[fabric.rank]):
                return settings.run_member(fabric)
        except Refusal:
            raise
        except (Exception, SystemExit) as error:  # it also ends those who wait for this one
            raise RunFailed(failure(settings.name_of(fabric.rank), Exit.failed(error))) from error

    with keeping_threads(), contextlib.redirect_stdout(out):
        torch.set_num_threads(settings.threads)
        results = fabric.run([run_member] * settings.members)
    return [results[settings.members_of(replica)[0]] for replica in range(settings.replicas)]
