"""Run a user's own script as several replicas: ``murmurate.run(main, replicas=4, strategy="gala")``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.process
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability, Fabric
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.spawn import FINISHED, Died, Exit, Worker, WorkerProcesses, take_signals
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.fabric.xla import XlaFabric
from murmurate.launch import script_ranks
from murmurate.launch.script_member import ByThread, Main, ScriptSettings, ended, failure, stdout_of
from murmurate.launch.script_xla import run_on_xla
from murmurate.replicator.replica_parts import check_parts
from murmurate.replicator.replicator import check_capabilities, check_common_rounds
from murmurate.spatial.parts import checked_grid
from murmurate.strategies import strategy as strategy_by_name
from murmurate.strategies.interface import Strategy

_PRELOADED = ("murmurate.launch.script", "torch._dynamo")  # optimizers import the second, which takes 1.6 s
_POLL_SECONDS = 1.0
_LAUNCHERS = ("local", "inline", "torchrun", "ray", "xla")


def run(
    main: Main,
    *,
    replicas: int | None = None,
    parts: int | tuple[int, int] = 1,
    strategy: str | Strategy = "all-reduce",
    launcher: Literal["local", "inline", "torchrun", "ray", "xla"] | None = None,
    seed: int = 0,
    workers: int = 1,
    devices: Sequence[str | Sequence[str]] = ("cpu",),
    collectives: bool = False,
    output: Literal["main", "all"] = "main",
    threads: int = 1,
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
        strategy: a name, for its default hyper-parameters, or a ``Strategy``. A strategy with a centre adds a
            member for it.
        launcher: "local" starts a process on this host for each member. "inline" starts a thread of this
            process for each member; one runs at a time, in an order drawn from ``seed``, so runs are
            repeatable and breakpoints work. "torchrun": each rank calls ``run``, and is one member. "ray"
            starts an actor of the Ray cluster for each member. "xla": each XLA device of this host (a TPU's
            core, for example) is a replica, and ``replicator.device()`` returns it. The default is "torchrun"
            in a script that torchrun started, else "local".
        workers, collectives: see ``OwnLoop``.
        devices: devices of the members, in turn; an item is a sequence of devices for a model-parallel
            replica.
        output: "main" prints the first replica's output, and errors; "all" prints that of all replicas, each
            line marked by rank.
        threads: number of torch threads in each process.
        deadline_seconds: how long a collective waits for a silent member. Not under "inline", where who waits
            for ever is found at once, nor under "xla", whose runtime has a limit of its own.

    An error of one member ends all: it is raised as RunFailed, with its traceback, or as Refusal. If a
    process is killed, ``Died`` is its replica's result, and the others go on as the strategy allows;
    RunFailed is raised if all replicas died. A replica ends when one of its parts does. Torchrun and XLA end
    all replicas when one dies; under torchrun, the result of another rank is None unless it consists of
    tensors, plain values and containers of these.
    """
    if launcher is not None and launcher not in _LAUNCHERS:
        known = f"{', '.join(_LAUNCHERS[:-1])} or {_LAUNCHERS[-1]}"
        raise Refusal(f"there is no launcher '{launcher}' for scripts: use {known}")
    if output not in ("main", "all"):
        raise Refusal(f"output is {output!r}; it is 'main' or 'all'")
    chosen = strategy_by_name(strategy)() if isinstance(strategy, str) else strategy
    grid = checked_grid(parts)
    environment = script_ranks.torchrun_environment()
    if launcher is None:
        launcher = "local" if environment is None else "torchrun"
    if environment is not None and environment.size > 1 and launcher in ("local", "ray"):
        raise Refusal(
            f"torchrun started this script {environment.size} times, and each would start replicas of its "
            f"own by launcher='{launcher}'. Leave launcher out: then each rank is a replica."
        )
    if environment is not None and launcher == "xla":
        raise Refusal("launcher='xla' starts a replica on each device: start the script without torchrun")
    if launcher == "torchrun":
        replicas = script_ranks.replicas_of(environment, replicas, grid)
    devices_wanted, replicas = replicas, 1 if replicas is None else replicas
    replica_devices = tuple((d,) if isinstance(d, str) else tuple(d) for d in devices)
    offered, offered_by = frozenset(Capability), "this host"
    if launcher == "torchrun":
        offered, offered_by = script_ranks.fabric_capabilities(environment)
    elif launcher == "xla":
        offered, offered_by = XlaFabric.capabilities, "XLA"
    check_capabilities(chosen, offered, offered_by, itertools.chain(*replica_devices))
    if collectives:
        check_common_rounds(chosen, "collectives")
    if replicas < 1:
        raise Refusal(f"replicas is {replicas}: use at least 1")
    chosen.check(replicas)
    settings = ScriptSettings(
        main, chosen, replicas, seed, workers, replica_devices, collectives, output, threads,
        deadline_seconds, grid,
    )  # fmt: skip
    check_parts(chosen, settings.parts)
    if launcher == "xla":
        _refuse_import()
        return run_on_xla(settings, devices_wanted)
    return _start(settings, launcher)


def _start(settings: ScriptSettings, launcher: str) -> list[Any]:
    if launcher == "inline":
        return _inline(settings)
    if launcher == "torchrun":
        return script_ranks.run_rank(settings)
    if launcher == "ray":
        from murmurate.launch.script_ray import run_on_ray

        return run_on_ray(settings)
    return _local(settings)


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
        except Exception as error:
            raise RunFailed(failure(settings.name_of(fabric.rank), Exit.failed(error))) from error

    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with contextlib.redirect_stdout(out):
            results = fabric.run([run_member] * settings.members)
    finally:
        torch.set_num_threads(threads_before)
    return [results[settings.members_of(replica)[0]] for replica in range(settings.replicas)]


# -- processes ----------------------------------------------------------------------------------------


def _refuse_import() -> None:
    """Raises Refusal in a process that is importing the script for a replica."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise Refusal(
            "each process imports the script, and this one started replicas while it was imported. Put "
            "murmurate.run(...) under: if __name__ == '__main__':"
        )


def _local(settings: ScriptSettings) -> list[Any]:
    _refuse_import()
    settings.pickled()  # raises Refusal if they cannot be sent to another process
    sys.stdout.flush()
    with WorkerProcesses(settings.members, _PRELOADED) as workers:
        for rank in range(settings.members):
            workers.start(rank, functools.partial(_run_worker, settings))
        return _collect(settings, workers)


def _collect(settings: ScriptSettings, workers: WorkerProcesses) -> list[Any]:
    """Collect results as they arrive. The first worker that fails ends the rest; if a worker is killed, the
    others go on without it. Once some worker has finished, workers that stay stopped are killed, and so is a
    centre that outlives all replicas."""
    results: dict[int, Any] = {}
    idle: Counter[int] = Counter()  # by rank: at how many successive polls the worker was idle
    while workers.alive:
        ended = workers.wait(_POLL_SECONDS)
        for worker in workers.alive if results and not ended else ():
            only_centre = worker.rank == settings.replicas * settings.parts and len(workers.alive) == 1
            idle[worker.rank] = idle[worker.rank] + 1 if only_centre or worker.is_stopped else 0
            if idle[worker.rank] * _POLL_SECONDS > settings.deadline_seconds:
                worker.kill()
        for worker in ended:
            assert worker.exit is not None
            result = settings.result_of(worker.rank, worker.exit, worker.process.exitcode)
            results[worker.rank] = result
            if isinstance(result, Died) or settings.strategy.common_rounds:
                workers.run_state.mark_dead(worker.rank)  # the others go on without it
    return settings.results(results)


def _run_worker(settings: ScriptSettings, worker: Worker) -> Exit:
    """The function of a script's worker process."""
    take_signals()
    fabric = ProcessFabric(worker.memory_file, worker.run_state, worker.rank, settings.deadline_seconds)
    end = settings.run_to_exit(fabric, stdout_of(settings.output, worker.rank))
    if end.how == FINISHED:
        worker.run_state.mark_finished(worker.rank)
    return end
