"""Run a user's own script as several replicas: ``murmurate.run(main, replicas=4, strategy="gala")``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from murmurate.errors import Refusal, unknown
from murmurate.launch import launchers, script_launchers
from murmurate.launch.script_arguments import (
    checked_devices,
    refuse_replicas_that_cannot_agree,
    seconds,
    whole_number,
)
from murmurate.launch.script_inline import InlineScripts
from murmurate.launch.script_launcher import ScriptLauncher
from murmurate.launch.script_local import LocalScripts
from murmurate.launch.script_member import Main, ScriptSettings
from murmurate.launch.script_ranks import TorchrunScripts, torchrun_environment
from murmurate.launch.script_xla import XlaScripts
from murmurate.launch.tasks import starter_of_several
from murmurate.replicator.replica_parts import check_parts
from murmurate.replicator.replicator import check_capabilities, check_common_rounds
from murmurate.spatial.parts import checked_grid
from murmurate.strategies import strategy_from
from murmurate.strategies.interface import Strategy

_IMPORTED: dict[str, type[ScriptLauncher]] = {
    kind.name: kind for kind in (LocalScripts, InlineScripts, TorchrunScripts, XlaScripts)
}


def run(
    main: Main,
    *,
    replicas: int | None = None,
    parts: int | tuple[int, int] = 1,
    strategy: str | Strategy | Mapping[str, object] = "all-reduce",
    launcher: str | None = None,
    seed: int = 0,
    workers: int = 1,
    devices: Sequence[str | Sequence[str]] = ("cpu",),
    collectives: bool = False,
    output: Literal["main", "all"] = "main",
    threads: int | None = None,
    deadline_seconds: float = 60.0,
) -> list[Any]:
    """Run ``main(replicator)`` as each replica, and return their results, by rank.

    Call it under ``if __name__ == "__main__":``, as each process imports the script again.

    Args:
        main: a function that takes an ``OwnLoop``; at module level, as other processes import it by name.
        replicas: by default 1; in a script that torchrun started, as many as the ranks form; under "xla", one
            for each device.
        parts: number of parts of each replica, along rows and columns of its images (see
            ``murmurate.spatial``). Each part is a member; ``replicator.parts`` connects those of a replica.
        strategy: a name, for its default hyper-parameters; a mapping of them and the name, such as
            ``{"name": "local-sgd", "period": 50}``; or a ``Strategy``. A strategy with a centre adds a
            member for it.
        launcher: "local" starts a process on this host for each member. "inline" starts a thread of this
            process for each member; one runs at a time, in an order drawn from ``seed``, so runs are
            repeatable and breakpoints work. "torchrun": each rank calls ``run``, and is one member. "ray"
            starts an actor of the Ray cluster for each member. "xla": each XLA device of this host (a TPU's
            core, for example) is a replica, and ``replicator.device()`` returns it. Other packages may add
            more (see ``murmurate.launch.script_launcher``). The default is "torchrun" in a script that
            torchrun started, else "local".
        workers, collectives: see ``OwnLoop``.
        devices: devices of the members, in turn; an item is a sequence of devices for a model-parallel
            replica. "auto": the GPUs of each host, in turn; the CPU where there is none. A replica's GPU is
            torch's current device in ``main``.
        output: "main" prints the first replica's output, and errors; "all" prints that of all replicas, each
            line marked by rank.
        threads: number of torch threads of each member. By default that of OMP_NUM_THREADS, which torchrun
            sets to 1 where it starts several ranks on a host, or, without the variable, an equal share of
            this host's cores; 1 under "ray" and "xla".
        deadline_seconds: how long a collective waits for a silent member. Not under "inline", where who waits
            for ever is found at once, nor under "xla", whose runtime has a limit of its own.

    An error of one member ends all: it is raised as RunFailed, with its traceback, or as Refusal. If a
    process is killed, ``Died`` is its replica's result, and the others go on as the strategy allows;
    RunFailed is raised if all replicas died, or the centre. A replica ends when one of its parts does. Under
    "local", a member that stays suspended (SIGSTOP) for ``deadline_seconds`` is killed. XLA ends all replicas
    when one dies, and torchrun those of the same host; where the ranks go on, ``Died.exit_code`` is None.
    Under torchrun, the result of another rank is None unless it consists of tensors, plain values and
    containers of these.

    Under "local", Ctrl-C, SIGTERM and a closed terminal raise KeyboardInterrupt in ``main`` of each replica,
    which may save within 10 s, and exchange with the centre meanwhile; a second Ctrl-C, or a SIGTERM more
    than 5 s after another, ends all at once. In replicas that have called ``OwnLoop.stopping`` a signal
    raises nothing, and they have any time to end. Then ``run`` raises KeyboardInterrupt or SystemExit, under
    "torchrun" SystemExit, with the signal's exit code (128 + its number).
    """
    if output not in ("main", "all"):
        raise Refusal(f"output is {output!r}; it is 'main' or 'all'")
    if not callable(main):
        raise Refusal(f"main is {main!r}: give a function that takes the replicator")
    chosen = strategy_from(strategy)
    grid = checked_grid(parts)
    engine = _engine(launcher)
    replicas = engine.replicas(None if replicas is None else whole_number("replicas", replicas), grid)
    member_devices = engine.devices(() if devices == "auto" else checked_devices(devices))
    members = replicas * math.prod(grid) + chosen.centre
    settings = ScriptSettings(
        main,
        chosen,
        replicas,
        whole_number("seed", seed, least=0),
        whole_number("workers", workers),
        member_devices,
        collectives,
        output,
        engine.threads(members) if threads is None else whole_number("threads", threads),
        seconds("deadline_seconds", deadline_seconds),
        grid,
    )
    check_capabilities(chosen, engine.offers, engine.place, itertools.chain(*member_devices))
    if collectives:
        check_common_rounds(chosen, "collectives")
    refuse_replicas_that_cannot_agree(chosen, replicas)
    chosen.check(replicas)
    check_parts(chosen, settings.parts)
    return engine.run(settings)


def _engine(name: str | None) -> ScriptLauncher:
    """The launcher ``name``, or the default where it is None, for this process. Raises Refusal if there is
    none, or if this process is one of several that would each start replicas of their own."""
    if name is not None and not isinstance(name, str):
        raise Refusal(f"launcher is {name!r}: give the name of one, such as 'local', or leave it out")
    environment = torchrun_environment()
    if name is None and environment is None and (starter := starter_of_several()) is not None:
        raise Refusal(
            f"{starter} of this script, and each would start replicas of its own. Start torchrun once on "
            "each host, and leave replicas out: srun --ntasks-per-node 1 torchrun --nnodes ... script.py. If "
            "the tasks are to be separate runs, use launcher='local'."
        )
    if name is None:
        name = "local" if environment is None else "torchrun"
    # other launchers are imported only if need be, as they import what trains recipes
    if name == "ray":
        from murmurate.launch.script_ray import RayScripts

        return RayScripts(environment)
    kind = _IMPORTED.get(name) or script_launchers().get(name)
    if kind is not None:
        return kind(environment)
    if name in launchers():
        raise Refusal(f"the {name} launcher trains recipes, and runs no scripts: leave launcher out")
    raise unknown("launcher for scripts", name, sorted(script_launchers()))
