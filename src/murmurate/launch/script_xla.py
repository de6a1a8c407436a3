"""A user's own script on XLA devices, such as TPUs: each device is a replica."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from typing import Any

import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.spawn import DIED, FINISHED, REFUSED, Died, Exit
from murmurate.fabric.xla import XlaFabric, run_on_devices
from murmurate.launch.rendezvous import Environment
from murmurate.launch.script_launcher import Devices, ScriptLauncher
from murmurate.launch.script_local import refuse_import
from murmurate.launch.script_member import ByThread, ScriptSettings, ended, stdout_of

_PREPARING = threading.Lock()


class XlaScripts(ScriptLauncher):
    """A thread for each XLA device of this host.

    Where several hosts have devices, each runs the script, and the results of other hosts' replicas are None.
    """

    name = "xla"
    offers = XlaFabric.capabilities
    place = "XLA"

    def __init__(self, environment: Environment | None) -> None:
        if environment is not None:
            raise Refusal("launcher='xla' starts a replica on each device: start the script without torchrun")

    def replicas(self, given: int | None, grid: tuple[int, int]) -> int:
        """``given`` is how many devices there must be; 1 stands for their number until they are known."""
        if grid != (1, 1):
            raise Refusal(
                "launcher='xla' runs replicas of one part: parts exchange messages, which XLA does not offer"
            )
        self._wanted = given
        return super().replicas(given, grid)

    def devices(self, named: Devices) -> Devices:
        if named not in ((), (("cpu",),)):
            raise Refusal("launcher='xla' gives each replica an XLA device: leave out devices")
        return (("cpu",),)

    def threads(self, members: int) -> int:
        return 1

    def run(self, settings: ScriptSettings) -> list[Any]:
        """Also raises MissingExtra where torch_xla is not installed; Refusal if there are more or fewer
        devices than were asked for."""
        refuse_import()
        settings.pickled()  # raises Refusal if they cannot be sent to another process
        sys.stdout.flush()
        ends = run_on_devices(functools.partial(_run_member, settings, self._wanted), self._wanted)
        if not ends:
            raise RunFailed("no XLA device could begin; see the output above")
        # whoever was waiting for a member that failed died with it: the failure is told first
        for rank, end in sorted(ends.items(), key=lambda item: (item[1].how in (DIED, FINISHED), item[0])):
            if end.how != FINISHED:
                settings.result_of(rank, end)
        size = max((end.result[0] for end in ends.values() if end.how == FINISHED), default=len(ends))
        results = {r: end.result[1] if end.how == FINISHED else Died(r, None) for r, end in ends.items()}
        return dataclasses.replace(settings, replicas=size).results({r: results.get(r) for r in range(size)})


def _run_member(settings: ScriptSettings, replicas: int | None, fabric: XlaFabric) -> Exit:
    """Run ``main`` on the calling thread's device; the result is (number of devices, ``main``'s result)."""
    if replicas not in (None, fabric.size):
        return Exit(
            REFUSED,
            f"there are {fabric.size} XLA devices, and replicas is {replicas}: leave out replicas for one on "
            "each device. On the CPU, the variable CPU_NUM_DEVICES sets how many devices it stands for.",
        )
    with _PREPARING:  # the threads of a process have one stdout
        by_thread = sys.stdout if isinstance(sys.stdout, ByThread) else ByThread(sys.stdout)
        with contextlib.redirect_stdout(by_thread.otherwise):
            out = by_thread.streams[threading.get_ident()] = stdout_of(settings.output, fabric.rank)
        sys.stdout = by_thread
        torch.set_num_threads(settings.threads)
    settings = dataclasses.replace(settings, replicas=fabric.size, devices=((str(fabric.device),),))
    try:
        settings.strategy.check(fabric.size)
        with ended(out):
            return Exit(FINISHED, result=(fabric.size, settings.run_member(fabric)))
    except Refusal as refusal:
        return Exit(REFUSED, str(refusal))
