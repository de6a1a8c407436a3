"""Fault injection on a simulated cluster: crashes, pauses, partitions and late joins, all from one seed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from murmurate.fabric.simulated.fabric import Partition, SimulatedFabric
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.monitor import Monitor

_RETRY_SECONDS = 0.1  # virtual: between attempts to let a replica join


class FaultInjector:
    """Schedules all faults of a run. start_rank: starts or restarts a replica, once the strategy allows
    it."""

    def __init__(
        self,
        cluster: Cluster,
        fabric: SimulatedFabric,
        monitor: Monitor,
        start_rank: Callable[[int], None],
        generator: np.random.Generator,
    ) -> None:
        self._cluster, self._fabric, self._monitor = cluster, fabric, monitor
        self._start_rank, self._generator = start_rank, generator
        self._paused_until: dict[int, float] = {}
        kinds: tuple[tuple[float | None, Callable[[int], None]], ...] = (
            (cluster.crash_every_seconds, self._crash),
            (cluster.pause_every_seconds, self._pause),
            (cluster.cut_every_seconds, self._cut),
        )
        for mean_seconds, inject in kinds:
            if mean_seconds is not None:
                self._schedule(mean_seconds, inject)
        replicas = monitor.run.replicas
        if cluster.partition:
            start, end, share = cluster.partition
            # not all members, or no link would be cut
            island = frozenset(range(max(1, min(round(share * replicas), monitor.run.members - 1))))
            fabric.cut(Partition(start_seconds=start, end_seconds=end, island=island))
            message = f"{len(island)} replicas are cut off from the rest until {end:g} s"
            fabric.at(start, lambda: monitor.event("partition", message) if monitor.running else None)
        for rank in cluster.late_ranks(replicas):
            fabric.at(cluster.late_join[1], functools.partial(self._enter, rank))

    def _schedule(self, mean_seconds: float, inject: Callable[[int], None]) -> None:
        """Schedule the next event of a Poisson process."""
        seconds = self._fabric.virtual_seconds + float(self._generator.exponential(mean_seconds))

        def act() -> None:
            running = self._monitor.running
            if len(running) > 1:  # the last running replica is spared, or the run would end
                inject(int(running[self._generator.integers(len(running))]))
            if not self._monitor.all_drained():
                self._schedule(mean_seconds, inject)

        self._fabric.at(seconds, act)

    def _crash(self, rank: int) -> None:
        monitor, restart_after = self._monitor, self._cluster.restart_after_seconds
        self._fabric.crash(rank)
        self._paused_until.pop(rank, None)  # a restarted process is not stopped
        monitor.learners[rank].freeze_costs()
        monitor.died[rank] = self._fabric.virtual_seconds
        monitor.event("died", f"replica {rank} died; {len(monitor.running)} go on", member=rank)
        if restart_after is not None:
            self._fabric.at(
                self._fabric.virtual_seconds + restart_after, functools.partial(self._enter, rank)
            )

    def _enter(self, rank: int) -> None:
        if self._monitor.running:
            self._start_rank(rank)
        elif not self._monitor.finished:  # no replica is running whose state it could load
            later = self._fabric.virtual_seconds + _RETRY_SECONDS
            self._fabric.at(later, functools.partial(self._enter, rank))

    def _pause(self, rank: int) -> None:
        now, seconds = self._fabric.virtual_seconds, self._cluster.pause_seconds
        if now < self._paused_until.get(rank, 0.0):  # a second SIGSTOP changes nothing
            return
        self._paused_until[rank] = now + seconds
        self._fabric.pause(rank, seconds)
        self._monitor.event("paused", f"replica {rank} is stopped for {seconds:g} s", member=rank)

    def _cut(self, rank: int) -> None:
        now, seconds = self._fabric.virtual_seconds, self._cluster.cut_seconds
        self._fabric.cut(Partition(start_seconds=now, end_seconds=now + seconds, island=frozenset({rank})))
        self._monitor.event("cut", f"replica {rank} is cut off from the rest for {seconds:g} s", member=rank)
