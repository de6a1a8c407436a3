"""``murmurate simulate``: from a Run and a Cluster to a finished run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import Faults as MailFaults
from murmurate.fabric.simulated.fabric import Member, SimulatedFabric
from murmurate.launch.inline import Inline
from murmurate.record.step_timer import NEVER, Bursts
from murmurate.record.strips import shown_of
from murmurate.replica.clipping import NotFinite
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.faults import Faults
from murmurate.simulation.member import Centre, Learner
from murmurate.simulation.result import summarize
from murmurate.simulation.watch import Watch
from murmurate.spec import derive_seed
from murmurate.training import checkpoint
from murmurate.training.data_record import record_data
from murmurate.training.run import Run
from murmurate.training.run_folder import claim, held, plain, unclaim, write_roles, write_run
from murmurate.training.session import FAILED, FINISHED, Finish, preflight, resolved
from murmurate.training.worker_context import member_state, staging

LAUNCHER = "simulated"
_DEADLINE_SECONDS = 600.0  # virtual: for collectives
_LATEST_SECONDS = 60.0  # virtual: for the last vectors to arrive before the mean of them is taken
_END = "simulated"
_TURNS_OF_A_BURST = 20


def simulate(run: Run, cluster: Cluster, folder: Path, quiet: bool = False) -> Finish:
    """Check everything that can be checked, then run. Raises Refusal with nothing changed."""
    cluster.validate()
    run.validate()
    # two say as much as a thousand, and need not have the memory of a thousand processes
    preflight(dataclasses.replace(run, replicas=min(run.replicas, 2)), Inline())
    run = dataclasses.replace(resolved(run), launcher=LAUNCHER)
    if any(device != "cpu" for device in run.placement.devices):
        raise Refusal("a simulated cluster lives on the CPU. Use --placement.devices cpu.")
    existed = folder.exists()
    claim(folder)
    try:
        with held(folder):
            write_run(folder, run, simulated=plain(cluster))
            record_data(folder, run.world)
            return Simulation(run, cluster, folder, quiet).carry_out()
    except Refusal:
        unclaim(folder, existed)
        raise


class Simulation:
    """One simulated run."""

    def __init__(self, run: Run, cluster: Cluster, folder: Path, quiet: bool) -> None:
        self.run, self.cluster, self.folder = run, cluster, folder
        self._say: Callable[[str], None] = (
            (lambda line: None) if quiet else functools.partial(print, file=sys.stderr, flush=True)
        )
        self._times = cluster.compute_model()
        self._lives = [0] * run.replicas
        self._noted = frozenset(shown_of(run.replicas))
        self._bursts = self._early_bursts()
        late, network = cluster.late(run.replicas), cluster.network_model()
        self.fabric = SimulatedFabric(
            run.members,
            derive_seed(run.seed, "schedule") % 2**32,
            network=network,
            mail_faults=MailFaults(loss=network.loss, resend_seconds=network.resend_seconds),
            collective_deadline_seconds=_DEADLINE_SECONDS,
            # what the strategy does not need is not there, and nobody meets for it
            capabilities=run.strategy.needs,
            keep_log=False,
            absent=late,
            own_clocks=True,
        )
        self.watch = Watch(run, cluster, folder, self.fabric, self._say)
        self.centre: Centre | None = None
        self.failure = ""
        generator = np.random.default_rng(derive_seed(run.seed, "faults"))
        Faults(cluster, self.fabric, self.watch, self._come, generator)

    def carry_out(self) -> Finish:
        run, watch, folder = self.run, self.watch, self.folder
        started = time.monotonic()
        write_roles(folder, dict.fromkeys(range(run.members)), run.replicas)
        with _one_thread(), _interrupts(watch) as signals:
            try:
                self.fabric.run([self._learn] * run.replicas + [self._serve] * run.strategy.centre)
                if not watch.finished:
                    raise RunFailed("all replicas died")
                if self.centre is not None and watch.updates:
                    centre = self.centre.replicator
                    if words := centre.refused_all or centre.untouched:
                        watch.event("warning", words)
                        self._say(f"warning: {words}")
                watch.record(last=True)
                self._save()
            except (NotFinite, FabricError, RunFailed) as failure:
                self.failure = f"failed: {failure}"
            finally:
                watch.close()
            reason = self.failure or ("interrupted" if signals else "finished")
            wall = time.monotonic() - started
            summary = summarize(run, self.cluster, folder, watch, self.centre, wall, reason)
        code = FAILED if self.failure else 128 + signals[0] if signals else FINISHED
        return Finish(code, summary, run=run)

    # -- roles --------------------------------------------------------------------------------------

    def _learn(self, door: Member) -> None:
        learner = self._learner(door)
        self.watch.begin(learner)
        learner.go(self.watch)

    def _learner(self, door: Member) -> Learner:
        life = self._lives[door.rank]
        seed = derive_seed(self.run.seed, f"compute, life {life}", door.rank)
        steps = self._times.steps(door.rank, np.random.default_rng(seed))
        return Learner(self.run, door, steps, life, self._bursts if door.rank in self._noted else NEVER)

    def _early_bursts(self) -> Bursts:
        """The first after five usual steps, then each half as late again; of a few turns, however long."""
        rank = self.run.replicas - 1  # not the straggler
        steps = self._times.steps(rank, np.random.default_rng(0))
        usual = statistics.median(sum(next(steps)) for _ in range(100))
        return Bursts(5 * usual, longest_pause_seconds=math.inf, seconds=0.0, least_turns=_TURNS_OF_A_BURST)

    def _serve(self, door: Member) -> None:
        self.centre = Centre(self.run, door)
        self.centre.go(self.watch)

    # -- coming late, coming back -------------------------------------------------------------------

    def _come(self, rank: int) -> None:
        """At once where nobody meets; else when all are between two rounds."""
        if self.run.strategy.synchronous:
            self.watch.admit_later(rank, functools.partial(self._enter, rank))
        else:
            self._enter(rank, self.watch.learners[self.watch.running[0]])

    def _enter(self, rank: int, donor: Learner) -> None:
        self._lives[rank] += rank in self.watch.learners

        def role(door: Member) -> None:
            learner = self._learner(door)
            learner.adopt(donor)
            self.watch.begin(learner)
            learner.go(self.watch)

        self.fabric.revive(rank, role, like=donor.rank)
        for other in self.watch.running:
            if other != rank:
                self.watch.learners[other].replicator.joined(rank)
        self.watch.died.pop(rank, None)
        self.watch.event("joined", f"replica {rank} joins with the state of {donor.rank}", member=rank)

    # -- the end ------------------------------------------------------------------------------------

    def _save(self) -> None:
        """A checkpoint with one part: the lowest living replica's, with the consensus of all."""
        run, watch = self.run, self.watch
        living = [rank for rank in self.fabric.living if rank in watch.finished]
        writer = living[0]
        end = max(watch.finished.values())

        def role(door: Member) -> None:
            learner = watch.learners.get(door.rank)
            if learner is None or (door.rank != writer and not run.strategy.synchronous):
                return
            door.compute(_LATEST_SECONDS)  # the last vectors of all have arrived
            if door.rank != writer:
                learner.replicator.consensus()
                return
            state = member_state(learner.replicator, end) | {
                "learner": learner.agent.state(),
                "source": {"first": []},
                "exact": False,
                "env_steps": learner.env_steps,
                "updates": learner.clock,
            }
            checkpoint.write_part(staging(self.folder, _END), writer, state)

        self.fabric.run([role] * run.members)
        about = {
            "env_steps": watch.env_steps,
            "seconds": end,
            "replicas": run.replicas,
            "living": living,
            "dead": sorted(watch.died),
            "best": None,
        }
        checkpoint.commit(self.folder / "checkpoints", staging(self.folder, _END), about)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small models one after the other: a team of threads would only be in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _interrupts(watch: Watch) -> Iterator[list[int]]:
    """Ctrl-C or SIGTERM once: every replica ends its step. Twice: KeyboardInterrupt."""
    numbers: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if numbers:
            raise KeyboardInterrupt
        numbers.append(number)
        watch.stop(signal.Signals(number).name)

    try:
        before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: somebody else's signals
        before = {}
    try:
        yield numbers
    finally:
        for number, former in before.items():
            signal.signal(number, former)
