"""Roles as actors of a Ray cluster, each with its share of cores and GPUs; the dead are replaced.

Ray starts the roles, places them and tells of their ends; every vector goes through the fabric. This process
is the coordinator. When a replica dies the others go on, as under the local launcher, while Ray starts
another in its place; once that one is ready all members save at the end of a step and begin a new *epoch*
from there, in which it has the parameters and moments of a living peer.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch import shutdown as _ending
from murmurate.launch.host_memory import Process, lend
from murmurate.launch.job_spec import Ground, Meeting, fresh_secret, prove
from murmurate.launch.ray_actor import STORE_SECONDS, Seat, Sitting
from murmurate.launch.ray_cluster import bundle, cluster, first_line, imported, place
from murmurate.launch.role import FINISHED, REFUSED
from murmurate.training import checkpoint as saved
from murmurate.training.coordinator import Coordinator, SecondInterrupt, signals
from murmurate.training.run import Run
from murmurate.training.run_folder import write_roles

CAPABILITIES = frozenset(Capability)
_POLL_SECONDS = 0.1
_SIT_SECONDS = 120.0  # for an actor's process to import all it needs
_RESTARTS = 3  # of one replica; what strikes it every time would strike on for ever


def check(run: Run) -> None:
    """Raise MissingExtra where Ray is not installed."""
    imported()


def start(
    run: Run,
    folder: Path,
    *,
    offset_seconds: float = 0.0,
    manifest: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
    parts: dict[int, int] | None = None,
) -> Coordinator:
    """Run the roles to their end (see ``murmurate.launch.local.start``).

    On the cluster of RAY_ADDRESS, or on a Ray of this host alone that ends with the run. Raises Refusal if
    there is no such cluster, or no room in it.
    """
    with cluster(run) as ray:
        flock = _Flock(ray, run, folder, offset_seconds, checkpoint, parts)
        try:
            flock.begin(manifest)
            with signals(flock.coordinator), flock.coordinator.console:
                while True:
                    flock.watch()
                    if not flock.another_epoch():
                        break
        except (RunFailed, SecondInterrupt) as failure:
            flock.coordinator.failure = failure
        finally:
            flock.close()
        return flock.coordinator


class _Flock:
    """The members of a run on a cluster, through all epochs."""

    coordinator: Coordinator
    ground: Ground

    def __init__(
        self,
        ray: Any,
        run: Run,
        folder: Path,
        offset_seconds: float,
        checkpoint: Path | None,
        parts: dict[int, int] | None,
    ) -> None:
        self.ray, self.run, self.folder = ray, run, folder
        self.started_at, self.offset_seconds = time.monotonic(), offset_seconds
        self.checkpoint, self.parts = checkpoint, parts
        self.address = str(ray.util.get_node_ip_address())
        self.store = TCPStore(
            self.address,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=STORE_SECONDS),
        )
        self.proof = prove(folder)
        self.epoch = 0
        self.memory_file: SharedMemoryFile | None = None
        self.group = place(ray, run)
        self.restarts: Counter[int] = Counter()
        self.seats: dict[int, Any] = {}
        self.sittings: dict[int, Sitting] = {}
        self.lives: dict[Any, int] = {}  # what is awaited -> whose it is
        self.coming: dict[int, tuple[Any, Any, float]] = {}  # rank -> actor, its sitting to be, since when
        self.reforming = False

    # -- an epoch

    def begin(self, manifest: dict[str, Any] | None) -> None:
        """Seat everybody and start the first epoch. Raises Refusal."""
        self._lend()
        waiting = {rank: self._seat(rank) for rank in range(self.run.members)}
        for rank, (actor, sitting) in waiting.items():
            try:
                self.seats[rank], self.sittings[rank] = actor, self.ray.get(sitting, timeout=_SIT_SECONDS)
            except self.ray.exceptions.RayError as error:
                raise Refusal(
                    f"Ray could not start replica {rank} ({first_line(error)}). murmurate must be installed "
                    "on every node, in the same version."
                ) from error
        self.started_at = time.monotonic()
        self._meet()
        self.coordinator = Coordinator(
            self.run, self.folder, self.ground.run_state, self.started_at, self.offset_seconds
        )
        if manifest is not None:
            self.coordinator.restore(manifest)
            self.coordinator.event("resumed", f"resumed at {manifest['env_steps']:,} env steps")
        if self.meeting.idle_compression:
            self.coordinator.event("warning", self.meeting.idle_compression)
        self._live()

    def another_epoch(self) -> bool:
        """After all members have ended: whether they ended only for a new one to come in, and go on."""
        at = self.coordinator
        if set(at.dead) >= set(range(self.run.replicas)):
            raise RunFailed("all replicas died; the last checkpoint is kept. See logs/ in the run folder.")
        committed = at.commit_final()
        if not (self.reforming and committed) or self._is_over():
            return False
        self.checkpoint = at.checkpoints / "last"
        found = saved.parts(self.checkpoint)
        learned = [rank for rank in found if rank < self.run.replicas]
        self.parts = {r: r if r in found else learned[r % len(learned)] for r in range(self.run.replicas)}
        self.parts |= {rank: rank for rank in found if rank >= self.run.replicas}
        for rank, (actor, sitting, _) in list(self.coming.items()):
            if self._has_come(rank):
                self.seats[rank], self.sittings[rank] = actor, self.ray.get(sitting)
                del self.coming[rank]
                at.dead.remove(rank)
                message = f"replica {rank} is back with what replica {self.parts[rank]} had learned"
                at.event("joined", message, member=rank)
        self.reforming = False
        self._lend()
        self._meet()
        at.run_state = self.ground.run_state
        self._live()
        return True

    def _is_over(self) -> bool:
        """Whether the run is at its end, or was stopped: not only this epoch, for a new one to be formed."""
        at, run_state, run = self.coordinator, self.coordinator.run_state, self.run
        if at.interrupted or at.stopped_because:
            return True
        living = [rank for rank in run_state.living() if rank < run.replicas]
        steps = run.env_steps is not None and run_state.total_env_steps() >= run.env_steps
        return steps or (run.updates is not None and all(run_state.clock(r) >= run.updates for r in living))

    def _lend(self) -> None:
        """Fresh memory: in the former, members stand at different places."""
        if self.memory_file is not None:
            self.ground.close()
            self.memory_file.close()
        self.memory_file = SharedMemoryFile.create()
        self.offer = lend(self.memory_file)
        self.epoch += 1

    def _meet(self) -> None:
        """Open the epoch's run_state: all who have a seat live on it, with the counts they go on from."""
        shares = self.offer.descriptor >= 0 and all(s.shares for s in self.sittings.values())
        self.meeting = Meeting(
            run_id=self.proof,
            epoch=self.epoch,
            members=self.run.members,
            leader=Process.this(),
            offer=self.offer if shares else None,
            secret=fresh_secret(),
            folder=str(self.folder.resolve()),
            proof=self.proof,
            started_at=self.started_at,
            elapsed_seconds=time.monotonic() - self.started_at,
            offset_seconds=self.offset_seconds,
            checkpoint=None if self.checkpoint is None else str(self.checkpoint.resolve()),
            parts=None if self.parts is None else {str(r): source for r, source in self.parts.items()},
            compression=self.run.compression,
        )
        store = PrefixStore(f"epoch-{self.epoch}", self.store)
        self.ground = Ground(self.meeting, store, [], leads=True, address=self.address)
        if self.checkpoint is not None:
            self._seed_board()
        for rank in range(self.run.members):
            if rank not in self.seats:
                self.ground.run_state.mark_dead(rank)

    def _seed_board(self) -> None:
        """Totals do not fall back to zero while the members read their parts."""
        assert self.checkpoint is not None
        manifest = saved.read_manifest(self.checkpoint)
        for rank, steps in enumerate(manifest.get("replica_env_steps", ())):
            self.ground.run_state.advance(rank, int(steps), 0)

    def _live(self) -> None:
        pids: dict[int, int | None] = {rank: s.process.pid for rank, s in sorted(self.sittings.items())}
        write_roles(self.folder, pids, self.run.replicas, {r: s.name for r, s in self.sittings.items()})
        where = (self.address, self.store.port)
        for rank, seat in self.seats.items():
            self.lives[seat.live.remote(self.run, rank, self.meeting, where)] = rank

    # -- watching

    def watch(self) -> None:
        """Until every member has ended: take in ends and arrivals, and let the coordinator work."""
        ending = _ending.Ending(self.coordinator)
        while self.lives:
            ended, _ = self.ray.wait(list(self.lives), num_returns=len(self.lives), timeout=_POLL_SECONDS)
            for life in ended:
                self._take_end(self.lives.pop(life), life)
            self.coordinator.poll()
            if not self.coordinator.is_due:
                self._look_who_comes()
            if ending.is_overdue():
                self._kill_silent()

    def _take_end(self, rank: int, life: Any) -> None:
        try:
            code, words = self.ray.get(life)
        except self.ray.exceptions.RayActorError as error:
            del self.seats[rank], self.sittings[rank]
            self.coordinator.died(rank, first_line(error))
            self._replace(rank)
            return
        except self.ray.exceptions.RayError as error:
            raise RunFailed(f"replica {rank}: {first_line(error)}") from error
        if code == REFUSED:
            raise Refusal(words or f"replica {rank} refused to start")
        if code != FINISHED:
            raise RunFailed(words or f"replica {rank} failed")

    def _replace(self, rank: int) -> None:
        """Ask Ray for another actor. A centre has no peer whose state it could take."""
        if rank >= self.run.replicas or self.restarts[rank] >= _RESTARTS or self._is_over():
            return
        self.restarts[rank] += 1
        actor, sitting = self._seat(rank)
        self.coming[rank] = actor, sitting, time.monotonic()

    def _look_who_comes(self) -> None:
        """Once a replacement is there, everybody saves, and a new epoch begins with it."""
        for rank, (_, sitting, _) in list(self.coming.items()):
            if not self.ray.wait([sitting], timeout=0)[0]:
                continue
            if self._has_come(rank):
                self.reforming = True
            else:
                del self.coming[rank]
                self._replace(rank)
        if self.reforming:
            self.ground.run_state.request_stop()

    def _has_come(self, rank: int) -> bool:
        _, sitting, _ = self.coming[rank]
        try:
            self.ray.get(sitting, timeout=0)
        except self.ray.exceptions.RayError:
            return False
        return True

    def _kill_silent(self) -> None:
        """As the local launcher does: those who hold up the others go first, then those who do not save."""
        late = sorted(self.lives.values())
        run_state = self.coordinator.run_state
        if not any(run_state.has_finished(rank) for rank in range(run_state.size)):
            raise RunFailed(
                f"no replica stopped within {_ending.STOP_DEADLINE_SECONDS:g} s, and all were killed. "
                "The last checkpoint is kept. See logs/ in the run folder."
            )
        unfinished = [rank for rank in late if not run_state.has_finished(rank)]
        # the centre ends after the replicas: it waits for whom it was not told of, as we do
        for rank in [rank for rank in unfinished if rank < self.run.replicas] or unfinished or late:
            who = self.coordinator.name(rank)
            message = f"{who} did not stop within {_ending.STOP_DEADLINE_SECONDS:g} s and is killed"
            self.coordinator.event("killed", message, member=rank)
            self.ray.kill(self.seats[rank])

    # -- actors

    def _seat(self, rank: int) -> tuple[Any, Any]:
        """(an actor for ``rank``, its sitting to be)"""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = bundle(self.run, rank)
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
        actor = (
            self.ray.remote(Seat)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                max_restarts=0,  # Ray's own restart knows nothing of a peer's state
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
            )
            .remote()
        )
        return actor, actor.sit.remote(self.offer)

    def close(self) -> None:
        for actor in [*self.seats.values(), *(actor for actor, *_ in self.coming.values())]:
            self.ray.kill(actor)
        self.ray.util.remove_placement_group(self.group)
        if hasattr(self, "coordinator"):
            self.coordinator.close()
        if hasattr(self, "ground"):
            self.ground.close()
        if self.memory_file is not None:
            self.memory_file.close()
