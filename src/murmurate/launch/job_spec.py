"""The job that a leader announces to processes which it did not fork, and their run state and fabrics."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from murmurate import __version__
from murmurate.errors import Refusal
from murmurate.fabric.interface import Fabric
from murmurate.fabric.network.authenticated_store import AuthenticatedStore, Unauthentic
from murmurate.fabric.network.fabric import Compression, NetworkFabric
from murmurate.fabric.network.store_run_state import StoreRunState
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import open_run_state
from murmurate.launch.host_memory import MemoryOffer, Process, borrow, this_host
from murmurate.launch.secret import SET_IT, VARIABLE, user_secret
from murmurate.training.run import Run
from murmurate.training.worker_context import Resume, WorkerContext

_PROOF = "job"  # name of the file with the proof, in logs/
# how long a fabric answers others before it closes: by then all members have saved, or the run has failed
_LINGER_SECONDS = 5.0
_COLLECTIVE_SECONDS = 60.0


def _versions() -> str:
    """The versions that must be the same on all hosts, in words; of torch without the kind of its build."""
    of_torch, python = torch.__version__.partition("+")[0], sys.version_info
    return f"murmurate {__version__}, torch {of_torch} and Python {python[0]}.{python[1]}"


def fresh_secret() -> str:
    """A random secret for the connections of one epoch; empty if the user has set MURMURATE_SECRET.

    Raises Refusal if the user's secret can be guessed.
    """
    return "" if user_secret() else secrets.token_hex(32)


@dataclass(frozen=True)
class JobSpec:
    """What the leader announces to all members about one epoch of a run; a new one begins when members are
    replaced or started again.

    leader: process that leads; by default this one.
    offer: offer of the leader's memory, if all members can share it; None if they communicate over the
    network.
    secret: secret of this epoch's connections, in hexadecimal; empty if MURMURATE_SECRET is set for the
    leader.
    folder: the run folder; a script has none.
    proof: a token that members must find in the run folder; for a script, a digest of the settings that all
    ranks must share.
    started_at, elapsed_seconds: start of the run on the leader's clock, and the time since then.
    resume: the checkpoint to continue from; None for a run that begins.
    compression: compression of vectors that are sent over the network.
    versions: what the leader has installed.
    finished: whether the run in the folder had finished before, so that there is nothing to do.
    """

    run_id: str
    epoch: int
    members: int
    offer: MemoryOffer | None
    started_at: float
    leader: Process = field(default_factory=Process.this)
    secret: str = field(default_factory=fresh_secret)
    folder: str = ""
    proof: str = ""
    elapsed_seconds: float = 0.0
    resume: Resume | None = None
    compression: Compression = "none"
    versions: str = field(default_factory=_versions)
    finished: bool = False

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> JobSpec:
        """The JobSpec whose ``dataclasses.asdict`` was sent as JSON. Raises Refusal if it is of another
        version."""
        if plain.get("versions") != (here := _versions()):
            raise Refusal(
                f"rank 0 has {plain.get('versions', 'another version of murmurate')}, and this host {here}. "
                "Install the same on every host."
            )
        offer, resume = plain["offer"], plain["resume"]
        if resume is not None:
            parts = {int(rank): source for rank, source in resume["parts"].items()}
            resume = Resume(**{**resume, "checkpoint": Path(resume["checkpoint"]), "parts": parts})
        return cls(
            **{
                **plain,
                "leader": Process(**plain["leader"]),
                "offer": None if offer is None else MemoryOffer(**offer),
                "resume": resume,
            }
        )

    @property
    def compression_warning(self) -> str:
        """A warning if compression has no effect, as no vector is sent over the network; else empty."""
        if self.offer is None or self.compression == "none":
            return ""
        return (
            f"compression {self.compression} has no effect: all members are on one host and share its memory"
        )


class MemberHost:
    """One process of a job, with the run state and the fabrics of the members in it (ranks ``mine``).

    store: the part of a c10d store that belongs to this epoch. leads: whether this process writes the
    launcher's cells of the run state. address: the address at which other hosts reach this one. Raises
    Refusal if this process has another secret than the leader.
    """

    def __init__(
        self, spec: JobSpec, store: Store, mine: Sequence[int], *, leads: bool, address: str
    ) -> None:
        self.spec = spec
        self._store, self._address = store, address
        self._memory_files: list[SharedMemoryFile] = []
        self._fabrics: list[NetworkFabric] = []
        same_clock = spec.leader.host == this_host()
        self.started_at = spec.started_at if same_clock else time.monotonic() - spec.elapsed_seconds
        counts = [] if spec.resume is None else spec.resume.counts()
        self.run_state: RunState
        if spec.offer is not None:
            self.run_state = open_run_state(self._memory_file(spec.offer), spec.members)
            if leads:
                self.run_state.open()
                self.run_state.set_counts(counts)
        else:
            place = f"murmurate/{spec.run_id}/{spec.epoch}"
            own_store = PrefixStore("run_state", store).clone()  # type: ignore[attr-defined]
            try:
                authenticated_store = AuthenticatedStore(own_store, place, self._secret())
                self.run_state = StoreRunState(spec.members, authenticated_store, mine, leads, counts=counts)
            except Unauthentic as problem:
                raise Refusal(f"{problem}. {SET_IT}") from problem

    def worker_context(self, rank: int, run: Run) -> WorkerContext:
        """The context of ``rank``, a member of this process, in ``run``. Raises Refusal if the part of the
        checkpoint that it resumes from cannot be read."""
        resume, folder = self.spec.resume, Path(self.spec.folder)
        restored = None if resume is None else resume.part(rank)
        offset_seconds = 0.0 if resume is None else resume.offset_seconds
        fabric = self.fabric(rank, _COLLECTIVE_SECONDS + run.more_seconds() + run.saving_seconds())
        return WorkerContext(rank, fabric, self.run_state, folder, self.started_at, offset_seconds, restored)

    def is_gone(self, rank: int, process: Process, silent_seconds: float) -> bool:
        """Whether the process of ``rank`` has ended or, on another host, has been silent for longer than
        ``silent_seconds`` or cannot be heard any more, as the store has failed."""
        has_ended = process.is_gone()
        if has_ended is None and isinstance(self.run_state, StoreRunState):
            run_state = self.run_state
            silence = run_state.silent_seconds(rank)
            if process == self.spec.leader:
                silence = max(silence, run_state.leader_silent_seconds())
            return run_state.lost or silence > silent_seconds
        return bool(has_ended)

    def flush(self) -> None:
        """Push the last changes of the run state to the other hosts."""
        if isinstance(self.run_state, StoreRunState):
            self.run_state.exchange()

    def close(self) -> None:
        # all at the same time, as each answers the others until they have closed too
        closing = [threading.Thread(target=fabric.close, args=(_LINGER_SECONDS,)) for fabric in self._fabrics]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        if isinstance(self.run_state, StoreRunState):
            self.run_state.close()
        for memory_file in self._memory_files:
            memory_file.close()

    def fabric(self, rank: int, deadline_seconds: float = _COLLECTIVE_SECONDS) -> Fabric:
        """A fabric for ``rank``, a member of this process; in shared memory if all members are on one host.

        deadline_seconds: the deadline of collectives, and of sends into a full queue.
        """
        spec = self.spec
        if spec.offer is not None:
            memory_file = self._memory_file(spec.offer)
            open_run_state(memory_file, spec.members)  # a member's own regions begin after the run state's
            return ProcessFabric(memory_file, self.run_state, rank, deadline_seconds)
        # a connection of its own, as one member's wait on a shared one would delay another's messages
        store = PrefixStore("fabric", self._store).clone()  # type: ignore[attr-defined]
        fabric = NetworkFabric(
            rank,
            spec.members,
            store,
            run_id=spec.run_id,
            epoch=spec.epoch,
            secret=self._secret(),
            address=self._address,
            run_state=self.run_state,
            deadline_seconds=deadline_seconds,
            compression=spec.compression,
        )
        self._fabrics.append(fabric)
        return fabric

    def _secret(self) -> bytes:
        """The secret for all communication between hosts: the user's, or one drawn for this epoch."""
        users, drawn = user_secret(), bytes.fromhex(self.spec.secret)
        if bool(users) == bool(drawn):
            here, there = ("has", "does not") if users else ("does not have", "does")
            raise Refusal(f"this host {here} {VARIABLE}, and the one that started the run {there}. {SET_IT}")
        return users or drawn

    def _memory_file(self, offer: MemoryOffer) -> SharedMemoryFile:
        """The leader's memory, opened again for each member, which takes its regions from the beginning."""
        memory_file = borrow(offer)
        if memory_file is None:
            raise RuntimeError("the leader's shared memory cannot be opened any more")
        self._memory_files.append(memory_file)
        return memory_file


def write_proof(folder: Path) -> str:
    """Write a random token into the run folder, which every member must be able to read; returns it."""
    token = secrets.token_hex(8)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / _PROOF).write_text(token)
    return token


def check_folder(spec: JobSpec) -> None:
    """Raise Refusal unless this host sees the leader's run folder under the same path."""
    try:
        token = (Path(spec.folder) / "logs" / _PROOF).read_text()
    except OSError:
        token = ""
    if token != spec.proof:
        raise Refusal(
            f"the run is kept in {spec.folder}, which is not the same folder on this host. "
            "All hosts write their part of a checkpoint there: give --out a folder that they share."
        )
