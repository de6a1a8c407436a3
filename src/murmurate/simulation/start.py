"""``murmurate simulate``: from a Run and a Cluster to a finished run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import FabricError
from murmurate.fabric.processes.memory_limits import refuse_if_small
from murmurate.fabric.simulated.fabric import MailFaults, Member, SimulatedFabric
from murmurate.fabric.simulated.latency import Straggler
from murmurate.launch import launcher
from murmurate.launch.inline import Inline
from murmurate.nets.torso import seeded_by
from murmurate.record.callbacks import Result
from murmurate.record.step_timer import NO_TRACE, TraceSchedule
from murmurate.record.timelines import shown_members
from murmurate.replica.clipping import NotFinite
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.faults import FaultInjector
from murmurate.simulation.member import Centre, SimulatedLearner
from murmurate.simulation.monitor import Monitor
from murmurate.simulation.result import summarize
from murmurate.spec import derive_generator, derive_seed
from murmurate.training import checkpoint
from murmurate.training.data_record import record_data
from murmurate.training.interrupts import SecondInterrupt, signals, signals_restored
from murmurate.training.memory import planned_bytes
from murmurate.training.preflight import prepared, resolved
from murmurate.training.run import Run
from murmurate.training.run_folder import plain, write_roles, write_run
from murmurate.training.session import Finish, claimed, exit_status
from murmurate.training.threads import keeping_threads
from murmurate.training.worker_context import member_state, staging

LAUNCHER = "simulated"
_DEADLINE_SECONDS = 600.0  # virtual: for collectives
_LATEST_SECONDS = 60.0  # virtual: for the last vectors to arrive before the consensus is taken
_STAGING = "simulated"  # names the folder that the checkpoint is written to before it is committed
_STEPS_OF_A_BURST = 20  # number of consecutive steps whose spans are recorded
_MEMBER_BYTES = 500_000  # memory of a member beside its vectors: learner, simulators, stack


@signals_restored()
def simulate(run: Run, cluster: Cluster, folder: Path | None, quiet: bool = False) -> Finish:
    """Check everything that can be checked, then run. Raises Refusal before anything has changed.

    folder: None for a new one below ``runs``.
    """
    _check(run, cluster)
    # two replicas suffice for these checks, and need less memory than a thousand
    fewer = prepared(dataclasses.replace(run, replicas=min(run.replicas, 2)), Inline())
    run = dataclasses.replace(fewer, replicas=run.replicas)
    refuse_if_small(
        run.members * (_MEMBER_BYTES + 16 * (planned_bytes(run) or 0)),
        f"{run.recipe} with {run.replicas} replicas",
    )
    run = dataclasses.replace(resolved(run), launcher=LAUNCHER)
    if any(device != "cpu" for device in run.placement.devices):
        raise Refusal("a simulated cluster runs on the CPU. Use --placement.devices cpu.")
    with claimed(folder, f"{run.recipe}-simulated") as folder:
        write_run(folder, run, simulated=plain(cluster))
        record_data(folder, run.world)
        return Simulation(run, cluster, folder, quiet).carry_out()


def _check(run: Run, cluster: Cluster) -> None:
    """Raise Refusal for a run or a cluster that contradicts itself, and for what a simulation has not."""
    cluster.validate()
    compute = cluster.compute_model()
    if isinstance(compute, Straggler) and compute.slow > run.replicas:
        raise Refusal(
            f"--compute {cluster.compute} slows {compute.slow} replicas, and the run has {run.replicas}: "
            "give fewer, or more --replicas."
        )
    if run.loggers:
        raise Refusal("a simulated run is recorded in its folder alone: leave out --loggers.")
    if run.launcher != Run.launcher and not launcher(run.launcher).one_process:
        raise Refusal(f"a simulated run has no processes to launch: leave out --launcher {run.launcher}.")
    if run.source.acting_processes():
        raise Refusal(
            "the actors of a simulated run would act in real time, beside its virtual clock: use --actors 0."
        )
    if run.compression != "none":
        raise Refusal(
            f"a simulated network carries vectors as they are: leave out --compression {run.compression}."
        )
    if run.probe_every_updates not in (0, Run.probe_every_updates):
        raise Refusal(
            "a simulated run compares its replicas in each of its records (--lines): leave out "
            "--probe-every-updates."
        )
    if run.restarts:
        raise Refusal(
            "a crashed replica of a simulation returns after --restart-after-seconds: leave out --restarts."
        )
    if run.evaluate_every_env_steps:
        raise Refusal(
            "a simulated run is not evaluated while it learns: leave out --evaluate-every-env-steps."
        )
    run.validate()
    if len(run.parts) > 1 or run.parts[0] > 1:
        raise Refusal("a simulated member has no parts of its own: leave out --parts")


class Simulation:
    """One simulated run."""

    def __init__(self, run: Run, cluster: Cluster, folder: Path, quiet: bool) -> None:
        self.run, self.cluster, self.folder = run, cluster, folder
        self._print_line: Callable[[str], None] = (
            (lambda line: None) if quiet else functools.partial(print, file=sys.stderr, flush=True)
        )
        self._compute = cluster.compute_model()
        self._incarnations = [0] * run.replicas
        self._traced_ranks = frozenset(shown_members(run.replicas))
        self._trace_schedule = self._early_trace_schedule()
        late_ranks, network = cluster.late_ranks(run.replicas), cluster.network_model()
        self.fabric = SimulatedFabric(
            run.members,
            derive_seed(run.seed, "schedule") % 2**32,
            network=network,
            mail_faults=MailFaults(loss=network.loss, resend_seconds=network.resend_seconds),
            collective_deadline_seconds=_DEADLINE_SECONDS,
            # no others, as the fabric would synchronize for capabilities that the strategy does not need
            capabilities=run.strategy.needs,
            keep_log=False,
            absent=late_ranks,
            own_clocks=True,
            coroutines="threads" if run.learner.collectives_in_backward else "greenlets",
            has_finished=lambda rank: rank in self.monitor.finished,
        )
        self.monitor = Monitor(run, cluster, folder, self.fabric, self._print_line)
        self.centre: Centre | None = None
        generator = np.random.default_rng(derive_seed(run.seed, "faults"))
        FaultInjector(cluster, self.fabric, self.monitor, self._start_rank, generator)

    def carry_out(self) -> Finish:
        run, monitor, folder = self.run, self.monitor, self.folder
        started = time.monotonic()
        write_roles(folder, dict.fromkeys(range(run.members)), run.replicas)
        # layers such as Dropout draw from the global generator
        generator = derive_generator(run.seed, "global generator")
        with _one_thread(), seeded_by(generator), signals(monitor):
            try:
                self.fabric.run([self._learn] * run.replicas + [self._serve] * run.strategy.centre)
                if not monitor.finished:
                    raise RunFailed("all replicas died")
                if self.centre is not None and monitor.updates:
                    centre = self.centre.replicator
                    if warning := centre.all_refused_warning or centre.no_update_warning:
                        self._warn(warning)
                late = self.cluster.late_ranks(run.replicas)
                if absent := [rank for rank in late if rank not in monitor.learners]:
                    self._warn(f"the run ended before {len(absent)} of {len(late)} late replicas joined")
                monitor.record(last=True)
                self._save()
                monitor.callbacks.checkpoint(folder / "checkpoints" / "last")
            except (NotFinite, FabricError, RunFailed) as failure:
                monitor.failure = RunFailed(str(failure))
            except SecondInterrupt:
                pass  # nothing is saved
            finally:
                monitor.close()
        code, reason = exit_status(monitor)
        summarized = functools.partial(
            summarize, run, folder, monitor, self.centre, time.monotonic() - started
        )
        try:
            with _one_thread(), signals(monitor, all_saved=True):
                summary = summarized(reason)
        except SecondInterrupt:
            code, reason = exit_status(monitor)
            summary = summarized(reason)
        monitor.callbacks.end(Result(folder, summary, code))
        return Finish(code, summary, folder, run, error=monitor.callbacks.error)

    def _warn(self, warning: str) -> None:
        self.monitor.event("warning", warning)
        self._print_line(f"warning: {warning}")

    # -- members ------------------------------------------------------------------------------------

    def _learn(self, member: Member) -> None:
        if self.monitor.interrupted and not self.monitor.updates:
            raise SecondInterrupt  # no update was made yet, so there is nothing to save
        learner = self._learner(member)
        self.monitor.begin(learner)
        learner.run_to_end(self.monitor)

    def _learner(self, member: Member) -> SimulatedLearner:
        incarnation = self._incarnations[member.rank]
        seed = derive_seed(self.run.seed, f"compute, life {incarnation}", member.rank)
        steps = self._compute.steps(member.rank, np.random.default_rng(seed))
        trace_schedule = self._trace_schedule if member.rank in self._traced_ranks else NO_TRACE
        return SimulatedLearner(self.run, member, steps, incarnation, trace_schedule)

    def _early_trace_schedule(self) -> TraceSchedule:
        """When spans are recorded: in bursts of 20 steps, the first after five typical steps, then at growing
        intervals."""
        rank = self.run.replicas - 1  # stragglers have the lowest ranks
        steps = self._compute.steps(rank, np.random.default_rng(0))
        typical_seconds = statistics.median(sum(next(steps)) for _ in range(100))
        return TraceSchedule(
            5 * typical_seconds,
            longest_pause_seconds=math.inf,
            seconds=0.0,
            least_iterations=_STEPS_OF_A_BURST,
        )

    def _serve(self, member: Member) -> None:
        self.centre = Centre(self.run, member)
        self.centre.run_to_end(self.monitor)

    # -- late and restarted replicas ----------------------------------------------------------------

    def _start_rank(self, rank: int) -> None:
        """Start a late or restarted replica: at once under an asynchronous strategy, else when all members
        are between two rounds."""
        if self.run.strategy.synchronous:
            self.monitor.admit_later(rank, functools.partial(self._enter, rank))
        else:
            self._enter(rank, self.monitor.learners[self.monitor.running[0]])

    def _enter(self, rank: int, donor: SimulatedLearner) -> None:
        self._incarnations[rank] += rank in self.monitor.learners

        def role(member: Member) -> None:
            learner = self._learner(member)
            learner.load_state_from_peer(donor)
            if (former := self.monitor.learners.get(rank)) is not None:
                learner.env_steps = former.env_steps
            self.monitor.begin(learner)
            learner.run_to_end(self.monitor)

        self.fabric.revive(rank, role, like=donor.rank)
        for peer in self.monitor.running:
            if peer != rank:
                self.monitor.learners[peer].replicator.joined(rank)
        self.monitor.died.pop(rank, None)
        self.monitor.event("joined", f"replica {rank} joins with the state of {donor.rank}", member=rank)

    # -- the end ------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save a checkpoint: the consensus, and one part, that of the living replica of the lowest rank."""
        run, monitor = self.run, self.monitor
        living = [rank for rank in self.fabric.living if rank in monitor.finished]
        writer = living[0]
        end = max(monitor.finished.values())

        def role(member: Member) -> None:
            learner = monitor.learners.get(member.rank)
            if learner is None or (member.rank != writer and not run.strategy.synchronous):
                return
            member.compute(_LATEST_SECONDS)  # so that the last vectors of all replicas arrive
            if member.rank != writer:
                learner.replicator.consensus()
                return
            state = member_state(learner.replicator, end) | {
                "learner": learner.agent.state(),
                "source": {"first": []},
                "exact": False,
                "env_steps": learner.env_steps,
                "updates": learner.updates,
            }
            checkpoint.write_part(staging(self.folder, _STAGING), writer, state)

        self.fabric.run([role] * run.members)
        manifest_fields = {
            "env_steps": monitor.env_steps,
            "seconds": end,
            "replicas": run.replicas,
            "living": living,
            "dead": sorted(monitor.died),
            "best": None,
        }
        checkpoint.commit(self.folder / "checkpoints", staging(self.folder, _STAGING), manifest_fields)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread: the models are small and run one after another."""
    with keeping_threads():
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        yield
