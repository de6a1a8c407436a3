"""A launcher for recipes and scripts: members of one process, in another order than inline's."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability, Fabric
from murmurate.fabric.processes.spawn import Exit
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.launch.inline import Inline
from murmurate.launch.script_launcher import ScriptLauncher
from murmurate.launch.script_member import ByThread, ScriptSettings, ended, failure, stdout_of
from murmurate.training.threads import keeping_threads


class Turns(Inline):
    """All roles as coroutines of this process."""

    name = "turns"


class ScriptsInTurns(ScriptLauncher):
    """Threads of this process, whose fabric offers no shared memory."""

    name = "turns"
    offers = frozenset(Capability) - {Capability.SHARED_MEMORY}
    place = "a fabric of turns"

    def threads(self, members: int) -> int:
        return 1

    def run(self, settings: ScriptSettings) -> list[Any]:
        out = ByThread(sys.stdout)
        streams = [stdout_of(settings.output, rank) for rank in range(settings.members)]

        def member(fabric: Fabric) -> Any:
            out.streams[threading.get_ident()] = streams[fabric.rank]
            try:
                with ended(streams[fabric.rank]):
                    return settings.run_member(fabric)
            except Refusal:
                raise
            except (Exception, SystemExit) as error:  # it also ends those who wait for this one
                raise RunFailed(failure(settings.name_of(fabric.rank), Exit.failed(error))) from error

        seed = settings.seed + 1
        fabric = SimulatedFabric(settings.members, seed, keep_log=False, coroutines="threads")
        with keeping_threads(), contextlib.redirect_stdout(out):
            torch.set_num_threads(settings.threads)
            results = fabric.run([member] * settings.members)
        return settings.results(dict(enumerate(results)))
