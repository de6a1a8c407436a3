"""Run a user's own script as several replicas: ``murmurate.run(main, replicas=4, strategy="gala")``."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability, Fabric
from murmurate.fabric.processes.spawn import Exit
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.fabric.xla import XlaFabric
from murmurate.launch import script_ranks
from murmurate.launch.rendezvous import Environment
from murmurate.launch.script_arguments import (
    automatic_devices,
    checked_devices,
    default_threads,
    refuse_missing_gpus,
    refuse_replicas_that_cannot_agree,
    seconds,
    whole_number,
)
from murmurate.launch.script_local import refuse_import, run_locally
from murmurate.launch.script_member import ByThread, Main, ScriptSettings, ended, failure, stdout_of
from murmurate.launch.script_xla import run_on_xla
from murmurate.launch.tasks import starter_of_several
from murmurate.replicator.replica_parts import check_parts
from murmurate.replicator.replicator import check_capabilities, check_common_rounds
from murmurate.spatial.parts import checked_grid
from murmurate.strategies import strategy_from
from murmurate.strategies.interface import Strategy
from murmurate.training.threads import keeping_threads

_LAUNCHERS = ("local", "inline", "torchrun", "ray", "xla")


def run(
    main: Main,
    *,
    replicas: int | None = None,
    parts: int | tuple[int, int] = 1,
    strategy: str | Strategy | Mapping[str, object] = "all-reduce",
    launcher: Literal["local", "inline", "torchrun", "ray", "xla"] | None = None,
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
            core, for example) is a replica, and ``replicator.device()`` returns it. The default is "torchrun"
            in a script that torchrun started, else "local".
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
    if launcher is not None and launcher not in _LAUNCHERS:
        known = f"{', '.join(_LAUNCHERS[:-1])} or {_LAUNCHERS[-1]}"
        raise Refusal(f"there is no launcher '{launcher}' for scripts: use {known}")
    if output not in ("main", "all"):
        raise Refusal(f"output is {output!r}; it is 'main' or 'all'")
    if not callable(main):
        raise Refusal(f"main is {main!r}: give a function that takes the replicator")
    chosen = strategy_from(strategy)
    named_devices = () if devices == "auto" else checked_devices(devices)
    threads = None if threads is None else whole_number("threads", threads)
    workers = whole_number("workers", workers)
    replicas = None if replicas is None else whole_number("replicas", replicas)
    seed = whole_number("seed", seed, least=0)
    deadline_seconds = seconds("deadline_seconds", deadline_seconds)
    grid = checked_grid(parts)
    environment = script_ranks.torchrun_environment()
    engine = _launcher_here(launcher, environment)
    member_devices = _devices_here(named_devices, engine, environment)
    if engine == "torchrun":
        replicas = script_ranks.replicas_of(environment, replicas, grid)
    devices_wanted, replicas = replicas, 1 if replicas is None else replicas
    offered, offered_by = _capabilities_here(engine, environment)
    check_capabilities(chosen, offered, offered_by, itertools.chain(*member_devices))
    if collectives:
        check_common_rounds(chosen, "collectives")
    refuse_replicas_that_cannot_agree(chosen, replicas)
    chosen.check(replicas)
    if threads is None:
        members = replicas * math.prod(grid) + chosen.centre
        here = math.ceil(members / environment.hosts) if environment else members
        threads = 1 if engine in ("ray", "xla") else default_threads(here)
    settings = ScriptSettings(
        main, chosen, replicas, seed, workers, member_devices, collectives, output, threads,
        deadline_seconds, grid,
    )  # fmt: skip
    check_parts(chosen, settings.parts)
    if engine == "xla":
        refuse_import()
        return run_on_xla(settings, devices_wanted)
    return _start(settings, engine)


def _launcher_here(launcher: str | None, environment: Environment | None) -> str:
    """``launcher``, or the default where it is None. Raises Refusal if this process is one of several that
    would each start replicas of their own. environment: that of torchrun, if it started this process."""
    if launcher is None and environment is None and (starter := starter_of_several()) is not None:
        raise Refusal(
            f"{starter} of this script, and each would start replicas of its own. Start torchrun once on "
            "each host, and leave replicas out: srun --ntasks-per-node 1 torchrun --nnodes ... script.py. If "
            "the tasks are to be separate runs, use launcher='local'."
        )
    if launcher is None:
        return "local" if environment is None else "torchrun"
    if environment is not None and environment.size > 1 and launcher in ("inline", "local", "ray"):
        raise Refusal(
            f"torchrun started this script {environment.size} times, and each would start replicas of its "
            f"own by launcher='{launcher}'. Leave launcher out: then each rank is a replica."
        )
    if environment is not None and launcher == "xla":
        raise Refusal("launcher='xla' starts a replica on each device: start the script without torchrun")
    return launcher


def _devices_here(
    named: tuple[tuple[str, ...], ...], launcher: str, environment: Environment | None
) -> tuple[tuple[str, ...], ...]:
    """The devices of the members in turn: ``named``, or the automatic ones if there are none. Raises Refusal
    for GPUs that this host does not have, if its members were to use them."""
    rank = 0 if environment is None else environment.rank
    devices = named or automatic_devices(launcher, int(os.environ.get("LOCAL_RANK", rank)))
    if launcher in ("inline", "local"):
        refuse_missing_gpus(devices)
    elif launcher == "torchrun":
        refuse_missing_gpus([devices[rank % len(devices)]])
    return devices


def _capabilities_here(launcher: str, environment: Environment | None) -> tuple[frozenset[Capability], str]:
    """The capabilities of the fabric between the members, and what has them, in words (for messages)."""
    if launcher == "torchrun":
        return script_ranks.fabric_capabilities(environment)
    if launcher == "xla":
        return XlaFabric.capabilities, "XLA"
    return frozenset(Capability), "this host"


def _start(settings: ScriptSettings, launcher: str) -> list[Any]:
    if launcher == "inline":
        return _inline(settings)
    if launcher == "torchrun":
        return script_ranks.run_rank(settings)
    if launcher == "ray":
        from murmurate.launch.script_ray import run_on_ray

        return run_on_ray(settings)
    return run_locally(settings)


def _inline(settings: ScriptSettings) -> list[Any]:
    fabric = SimulatedFabric(settings.members, settings.seed, keep_log=False, coroutines="threads")

    out = ByThread(sys.stdout)
    streams = [stdout_of(settings.output, rank) for rank in range(settings.members)]

    def run_member(fabric: Fabric) -> Any:
        out.streams[threading.get_ident()] = streams[fabric.rank]
        try:
            with ended(streams[fabric.rank]):
                return settings.run_member(fabric)
        except Refusal:
            raise
        except (Exception, SystemExit) as error:
            raise RunFailed(failure(settings.name_of(fabric.rank), Exit.failed(error))) from error

    with keeping_threads(), contextlib.redirect_stdout(out):
        torch.set_num_threads(settings.threads)
        results = fabric.run([run_member] * settings.members)
    return [results[settings.members_of(replica)[0]] for replica in range(settings.replicas)]
