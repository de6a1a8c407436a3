"""Launchers, which start the workers of a run and give each a fabric (see ``murmurate.training.launcher``),
and those of scripts (see ``murmurate.launch.script_launcher``).

Each is a class in a module of this folder, or in a module that an entry point adds to it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from murmurate import plugins
from murmurate.errors import Refusal, unknown
from murmurate.launch.tasks import starter_of_several

if TYPE_CHECKING:
    from murmurate.launch.script_launcher import ScriptLauncher
    from murmurate.training.launcher import Launcher


def launchers() -> dict[str, Launcher]:
    """Every launcher by its command-line name (see ``plugins``). Raises Refusal where two have one name."""
    from murmurate.training.launcher import Launcher  # imports torch, which murmurate secret does not need

    return {name: kind() for name, kind in sorted(_by_name(Launcher).items())}


def script_launchers() -> dict[str, type[ScriptLauncher]]:
    """The class of every launcher of ``murmurate.run`` by its name. Raises Refusal where two have one."""
    from murmurate.launch.script_launcher import ScriptLauncher

    return _by_name(ScriptLauncher)


def _by_name(base: Any) -> dict[str, Any]:
    """The classes that inherit ``base``, in all modules of this folder, by their ``name``."""
    by_name: dict[str, Any] = {}
    for module in plugins.modules(__name__):
        classes: list[Any] = [value for value in vars(module).values() if isinstance(value, type)]
        for value in classes:
            if issubclass(value, base) and value is not base:
                plugins.refuse_clash("launchers", value.name, by_name.setdefault(value.name, value), value)
    return by_name


def launcher(name: str) -> Launcher:
    """The launcher called ``name``. Raises Refusal, with the nearest name, if there is none."""
    available = launchers()
    if name not in available:
        raise unknown("launcher", name, available)
    return available[name]


def api_launcher(name: str) -> Launcher:
    """``launcher(name)``. Also raises Refusal if torchrun started this process several times, and each would
    start a run of its own."""
    found = launcher(name)
    ranks = launcher("torchrun").dictated_replicas() or 1
    if found.dictated_replicas() is None and ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise Refusal(
            f"torchrun started this program {ranks} times, and each would start a run of its own by the "
            f"{name} launcher. Add --launcher torchrun (in Python: launcher='torchrun'): then each rank is a "
            "replica of one run; or leave torchrun out."
        )
    return found


def command_launcher(name: str) -> Launcher:
    """``api_launcher(name)`` for a command. Also raises Refusal if srun or mpirun started the command
    several times, and each would start a run of its own."""
    found = api_launcher(name)
    is_rank = any(each.dictated_replicas() is not None for each in (found, launcher("torchrun")))
    starter = None if is_rank else starter_of_several()
    if starter is not None:
        raise Refusal(
            f"{starter} of this command, and each would start a run of its own. Start torchrun once on each "
            "host: srun --ntasks-per-node 1 torchrun --nnodes ... -m murmurate ... --launcher torchrun. Runs "
            "that are to be separate are started one by one (srun -n 1)."
        )
    return found
