"""A launcher for recipes and scripts: members of one process, in another order than inline's."""

from __future__ import annotations

from typing import Any

from murmurate.fabric.interface import Capability, Fabric
from murmurate.fabric.processes.spawn import Exit
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.launch.inline import Inline
from murmurate.launch.script_launcher import ScriptLauncher
from murmurate.launch.script_member import ScriptSettings, stdout_of


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
        def member(fabric: Fabric) -> Any:
            try:
                return settings.run_to_exit(fabric, stdout_of(settings.output, fabric.rank))
            except Exception as error:
                return Exit.failed(error)

        seed = settings.seed + 1
        fabric = SimulatedFabric(settings.members, seed, keep_log=False, coroutines="threads")
        ends: Any = fabric.run([member] * settings.members)
        return settings.results({rank: settings.result_of(rank, end) for rank, end in enumerate(ends)})
