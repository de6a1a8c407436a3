"""A launcher for recipes and scripts: members of one process, in another order than inline's."""

from __future__ import annotations

from typing import Any

from murmurate.fabric.interface import Capability
from murmurate.launch.inline import Inline
from murmurate.launch.script_inline import run_in_threads
from murmurate.launch.script_launcher import ScriptLauncher
from murmurate.launch.script_member import ScriptSettings


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
        return run_in_threads(settings, settings.seed + 1)
