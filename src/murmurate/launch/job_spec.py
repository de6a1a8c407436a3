"""Where members that nobody forked together meet: run state and fabric, on one host or across hosts."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from murmurate.errors import Refusal
from murmurate.fabric.interface import Fabric
from murmurate.fabric.network.fabric import Compression, NetworkFabric
from murmurate.fabric.network.store_run_state import StoreRunState
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch.host_memory import Offer, Process, borrow, this_host
from murmurate.launch.role import open_run_state
from murmurate.training.worker import Post, Restored

_PROOF = "meeting"
_LINGER_SECONDS = 5.0  # everybody has saved, or the run has failed


@dataclass(frozen=True)
class Meeting:
    """What the leader tells all members about one epoch of a run.

    offer: of its host's memory, which all members share; None if they do not, and talk over the network.
    secret: of this epoch's links, in hexadecimal; empty where MURMURATE_SECRET, set on every host, is it.
    started_at, elapsed_seconds: what the leader's clock said when the run began, and how long ago that was.
    checkpoint, parts: what to go on from (rank -> which replica's part).
    compression: of what goes over the network.
    """

    run_id: str
    epoch: int
    members: int
    leader: Process
    offer: Offer | None
    secret: str
    folder: str
    proof: str
    started_at: float
    elapsed_seconds: float = 0.0
    offset_seconds: float = 0.0
    checkpoint: str | None = None
    parts: dict[str, int] | None = None
    compression: Compression = "none"

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Meeting:
        """From ``dataclasses.asdict``, as JSON leaves it."""
        offer = plain["offer"]
        return cls(
            **{
                **plain,
                "leader": Process(**plain["leader"]),
                "offer": None if offer is None else Offer(**offer),
            }
        )

    @property
    def idle_compression(self) -> str:
        """What to say where compression was asked for and nothing goes over the network; else empty."""
        if self.offer is None or self.compression == "none":
            return ""
        return (
            f"compression {self.compression} has no effect: all members are on one host and share its memory"
        )


class Ground:
    """What one process stands on in a meeting; ``mine`` are the members that live in it.

    store: of this epoch alone. leads: this process writes what a launcher writes on the run state.
    address: under which other hosts reach this one.
    """

    def __init__(
        self, meeting: Meeting, store: Store, mine: Sequence[int], *, leads: bool, address: str
    ) -> None:
        self.meeting = meeting
        self._store, self._address = store, address
        self._memory_files: list[SharedMemoryFile] = []
        self._doors: list[NetworkFabric] = []
        same = meeting.leader.host == this_host()  # one clock for all processes of a host
        self.started_at = meeting.started_at if same else time.monotonic() - meeting.elapsed_seconds
        self.run_state: RunState
        if meeting.offer is not None:
            self.run_state = open_run_state(self._memory_file(meeting.offer), meeting.members)
            if leads:
                self.run_state.open()
        else:
            run_states = PrefixStore("run_state", store).clone()  # type: ignore[attr-defined]
            self.run_state = StoreRunState(meeting.members, run_states, mine, leads)

    def post(self, rank: int) -> Post:
        """Where ``rank``, a member of this process, works. Raises Refusal if its part is unreadable."""
        meeting = self.meeting
        restored = None
        if meeting.checkpoint is not None and meeting.parts is not None:
            restored = Restored.read(Path(meeting.checkpoint), rank, meeting.parts[str(rank)])
        return Post(
            rank,
            self._door(rank),
            self.run_state,
            Path(meeting.folder),
            self.started_at,
            meeting.offset_seconds,
            restored,
        )

    def is_gone(self, rank: int, process: Process, silent_seconds: float) -> bool:
        """Whether the process of ``rank`` has ended or, on another host, was silent for so long."""
        gone = process.is_gone()
        if gone is None and isinstance(self.run_state, StoreRunState):
            return self.run_state.lost or self.run_state.silent_seconds(rank) > silent_seconds
        return bool(gone)

    def flush(self) -> None:
        """Let the others see what was last written to the run state."""
        if isinstance(self.run_state, StoreRunState):
            self.run_state.exchange()

    def close(self) -> None:
        # together: each answers the others until they have closed too
        closing = [threading.Thread(target=door.close, args=(_LINGER_SECONDS,)) for door in self._doors]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        if isinstance(self.run_state, StoreRunState):
            self.run_state.close()
        for memory_file in self._memory_files:
            memory_file.close()

    def _door(self, rank: int) -> Fabric:
        meeting = self.meeting
        if meeting.offer is not None:
            memory_file = self._memory_file(meeting.offer)
            open_run_state(memory_file, meeting.members)  # a member's own regions begin after the run state's
            return ProcessFabric(memory_file, self.run_state, rank)
        # of its own: a wait of one member on a shared connection would hold up another's word
        store = PrefixStore("fabric", self._store).clone()  # type: ignore[attr-defined]
        door = NetworkFabric(
            rank,
            meeting.members,
            store,
            run_id=meeting.run_id,
            epoch=meeting.epoch,
            secret=bytes.fromhex(meeting.secret) or os.environ["MURMURATE_SECRET"].encode(),
            address=self._address,
            run_state=self.run_state,
            compression=meeting.compression,
        )
        self._doors.append(door)
        return door

    def _memory_file(self, offer: Offer) -> SharedMemoryFile:
        """The lent memory from its beginning on: each member takes its regions from one of its own."""
        memory_file = borrow(offer)
        if memory_file is None:
            raise RuntimeError("the memory that was lent a moment ago cannot be opened any more")
        self._memory_files.append(memory_file)
        return memory_file


def fresh_secret() -> str:
    """A key for the links of one epoch; none where the user keeps one out of the store."""
    return "" if os.environ.get("MURMURATE_SECRET") else secrets.token_hex(32)


def prove(folder: Path) -> str:
    """Leave a word in the run folder that every member must be able to read."""
    word = secrets.token_hex(8)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / _PROOF).write_text(word)
    return word


def check_folder(meeting: Meeting) -> None:
    """Raise Refusal unless the run folder is the leader's."""
    try:
        seen = (Path(meeting.folder) / "logs" / _PROOF).read_text()
    except OSError:
        seen = ""
    if seen != meeting.proof:
        raise Refusal(
            f"the run is kept in {meeting.folder}, which is not the same folder on this host. "
            "All hosts write their part of a checkpoint there: give --out a folder that they share."
        )
