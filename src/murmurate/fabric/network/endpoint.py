"""All connections of one member: the rendezvous, the listener, and the routing of frames to channels."""

from __future__ import annotations

import collections
import contextlib
import datetime
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from murmurate.buffers import Pool
from murmurate.fabric.awake import AwakeClock
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network.authenticated_store import AuthenticatedStore, Unauthentic
from murmurate.fabric.network.connection import PeerConnection
from murmurate.fabric.network.crypto import PeerRecord
from murmurate.fabric.network.frames import Closed, Frame, FrameRejected, Kind
from murmurate.fabric.network.handshake import Credentials, answer
from murmurate.fabric.network.listener import Listener
from murmurate.fabric.network.pending import PendingMessages
from murmurate.fabric.processes.run_state import RunState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from murmurate.fabric.network.channel import NetworkChannel

log = logging.getLogger("murmurate.fabric.network.fabric")

_JOIN_SECONDS = 2.0
# how long to wait for a valid record in place of one made with another secret, perhaps by an earlier process
_REFUSED_SECONDS = 5.0
_LONGEST_SECONDS = 1e9  # stands for longer deadlines, also infinite ones, which waits do not accept
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 20e-6, 500e-6  # between two polls of shared memory


class Endpoint:
    """All connections of one member, with one lock for them all."""

    def __init__(
        self,
        credentials: Credentials,
        size: int,
        store: Store,
        address: str,
        run_state: RunState | None,
        deadline_seconds: float,
    ) -> None:
        self.rank, self.size = credentials.rank, size
        self.credentials, self.address = credentials, address
        self.deadline_seconds = min(deadline_seconds, _LONGEST_SECONDS)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closed = False
        self.refused: collections.Counter[str] = collections.Counter()
        self.pool = Pool(keep=16)  # for incoming payloads
        self.outgoing_buffers = Pool()  # for outgoing payloads
        # for outgoing payloads of collectives, which local peers read in shared memory
        shm = credentials.shm
        self.shared_buffers = Pool() if shm is None else Pool(keep=16, allocate=shm.new_buffer)
        self.connections: dict[int, PeerConnection] = {}
        self._run_state = run_state
        place = f"murmurate/{credentials.run.hex()}/{credentials.epoch}"
        self._store = AuthenticatedStore(store, place, credentials.secret)
        self._channels: dict[bytes, NetworkChannel] = {}
        self.pending = PendingMessages(size)
        self._next_channel: dict[int, int] = {}  # by peer: the channel whose turn it is to send
        self._listener = Listener(address, size, self._accept, self.refuse)
        self.port = self._listener.port
        try:
            self._rendezvous(address)
        except BaseException:
            self._close_connections()
            raise

    # -- the rendezvous -----------------------------------------------------------------------------

    def _rendezvous(self, address: str) -> None:
        """Publish our record, wait for the records of all others, and then for the connections."""
        identity = self.credentials.identity
        record = PeerRecord(self.rank, address, self.port, identity.public, identity.incarnation)
        self._store.set(str(self.rank), record.pack())
        end = time.monotonic() + self.deadline_seconds
        others = [rank for rank in range(self.size) if rank != self.rank]
        records = {rank: self._await_record(rank, end) for rank in others}
        with self.lock:
            for rank, peer_record in records.items():
                self.connections[rank] = PeerConnection(self, peer_record)
            for connection in self.connections.values():
                connection.start()
            self.wait(lambda: not self._never_connected(), self.deadline_seconds)
            if peers := self._never_connected():  # going on without them, each side would train alone
                where = ", ".join(f"{p.peer} ({p.record.address} port {p.record.port})" for p in peers)
                raise FabricError(
                    f"rank {self.rank} has no connection to rank(s) {where} after "
                    f"{self.deadline_seconds:g} s. "
                    "Hosts must reach each other at these addresses: open their ports, or name each host's "
                    "address by MURMURATE_ADDRESS."
                )

    def _never_connected(self) -> list[PeerConnection]:
        return [
            x for rank, x in self.connections.items() if not (x.times_connected or self._is_marked_dead(rank))
        ]

    def _await_record(self, rank: int, end: float) -> PeerRecord:
        problem, refused = "it did not arrive", False
        while (left := end - time.monotonic()) > 0:
            try:
                self._store.wait(str(rank), datetime.timedelta(seconds=left))
            except RuntimeError:  # torch's DistStoreError, at the deadline
                break
            record, problem = self._read_record(rank)
            if record is not None:
                return record
            if not refused:
                refused, end = True, min(end, time.monotonic() + _REFUSED_SECONDS)
            time.sleep(min(0.05, max(left, 0.0)))
        waited = min(self.deadline_seconds, _REFUSED_SECONDS) if refused else self.deadline_seconds
        raise FabricError(
            f"rank {self.rank} waited {waited:g} s for rank {rank} at the rendezvous: "
            f"{problem}. Look at its log, and start all members with the same run id, epoch and secret."
        )

    def _read_record(self, rank: int) -> tuple[PeerRecord | None, str]:
        try:
            record = PeerRecord.read(self._store.get(str(rank)))
            if record.rank != rank:
                raise ValueError(f"it is the record of rank {record.rank}")
        except (Unauthentic, ValueError) as problem:
            self.refuse("key", f"the record of rank {rank} is refused: {problem}", rank)
            return None, str(problem)
        return record, ""

    def current_record(self, rank: int) -> PeerRecord | None:
        """The record of ``rank`` as it is now at the rendezvous."""
        try:
            return self._read_record(rank)[0]
        except RuntimeError:  # the store has gone; connections do not need it any more
            return None

    # -- the listener -------------------------------------------------------------------------------

    def _accept(self, sock: socket.socket, seconds: float) -> None:
        """The listener's side of a handshake; called in a thread of its own."""
        try:
            handshake = answer(
                self.credentials, sock, self._record_of, lambda rank: self.connections[rank].received, seconds
            )
            self.connections[handshake.rank].adopt(handshake)
        except FrameRejected as refusal:
            self.refuse("handshake" if refusal.cause == "truncated" else refusal.cause, str(refusal))
            sock.close()
        except (Closed, OSError, RuntimeError):
            sock.close()

    def _record_of(self, rank: int, incarnation: bytes) -> PeerRecord | None:
        """The record that belongs to ``rank`` and ``incarnation``, whose key the member must prove to have;
        it is read from the store again if the member has restarted. None if there is none."""
        connection = self.connections.get(rank)
        if connection is None:
            raise Closed  # our connections are not made yet (the peer will try again), or the rank is unknown
        if connection.record.incarnation == incarnation:
            return connection.record
        record = self.current_record(rank)
        if record is None or record.incarnation != incarnation:
            return None
        connection.replace(record)
        return record

    # -- called by connections, with the lock held unless it says otherwise -------------------------

    def allocate_payload(self, frame: Frame, length: int) -> Any:
        """A buffer for a payload; without the lock. Raises FrameRejected."""
        with self.lock:
            # until this member has made the channel, its peers wait, as the connection is not read
            self.changed.wait_for(
                lambda: self.closed or frame.channel in self._channels or self.pending.has_room(length),
                self.deadline_seconds,
            )
            channel = self._channels.get(frame.channel)
            if channel is not None:
                return channel.allocate_payload(frame, length)
            return self.pending.allocate_payload(length)

    def deliver(self, connection: PeerConnection, frame: Frame) -> None:
        if frame.kind is Kind.FINISHED:
            return
        channel = self._channels.get(frame.channel)
        if channel is not None:
            channel.deliver(connection.peer, frame)
        else:
            self.pending.keep(connection.peer, frame)

    def receive_announcement(self, connection: PeerConnection, key: tuple[str, ...], value: Any) -> None:
        if len(key) < 2:
            raise FrameRejected("meta", f"a control message about {key}")
        try:
            channel = self._channels.get(bytes.fromhex(key[1]))
        except ValueError:
            raise FrameRejected("meta", "a control message without a channel") from None
        if channel is not None:
            channel.receive_announcement(connection.peer, key[0], key[2:], value)
        else:
            self.pending.keep_announcement(connection.peer, key, value)

    def next_register_frame(self, connection: PeerConnection) -> Frame | None:
        """A frame with the newest version of a vector that this peer has requested, or None. The channels
        take turns."""
        channels = list(self._channels.values())
        start = self._next_channel.get(connection.peer, 0)
        for step in range(len(channels)):
            index = (start + step) % len(channels)
            frame = channels[index].next_register_frame(connection.peer)
            if frame is not None:
                self._next_channel[connection.peer] = index + 1
                return frame
        return None

    def refuse(self, cause: str, sentence: str, rank: int | None = None) -> None:
        """Count a refusal; log the 1st, 2nd, 4th, 8th ... of each cause, so that the log stays short. May be
        called without the lock."""
        with self.lock:
            self.refused[cause] += 1
            count = self.refused[cause]
        if count & (count - 1) == 0:
            who = "" if rank is None else f" (rank {rank})"
            log.warning("refused [%s, no. %d]%s: %s", cause, count, who, sentence)

    def local_peer_found(self, connection: PeerConnection) -> None:
        """The peer, in this incarnation, is local: each can read the other's shared memory."""
        for channel in self._channels.values():
            channel.local_peer_found(connection.peer)

    def peer_restarted(self, connection: PeerConnection) -> None:
        self.pending.forget_announcements(connection.peer)
        for channel in self._channels.values():
            channel.peer_restarted(connection.peer)

    def notify(self) -> None:
        """Wake all threads that wait for a condition."""
        self.changed.notify_all()

    # -- called by channels -----------------------------------------------------------------------

    def add_channel(self, identity: bytes, channel: NetworkChannel) -> None:
        """Deliver to ``channel`` all its frames from now on, and those that arrived before it was made."""
        with self.lock:
            if identity in self._channels:
                raise FabricError("a channel of that name exists already: give each channel its own name")
            self._channels[identity] = channel
            for peer, frame in self.pending.take(identity):
                with self._refusing(peer):
                    channel.deliver(peer, frame)
            for peer, key, value in self.pending.take_announcements(identity):
                with self._refusing(peer):
                    channel.receive_announcement(peer, key[0], key[2:], value)
            self.notify()  # threads that wait for the channel, or for room

    @contextlib.contextmanager
    def _refusing(self, rank: int) -> Iterator[None]:
        """Count a ``FrameRejected`` raised within, as the thread that reads frames does for others."""
        try:
            yield
        except FrameRejected as refusal:
            self.refuse(refusal.cause, str(refusal), rank)

    def wait(self, condition: Any, deadline_seconds: float, in_memory: bool = False) -> bool:
        """Wait for ``condition()``, with the lock released meanwhile; False at the deadline. A death marked
        in the run state is noticed within 50 ms.

        in_memory: whether a local peer may make the condition true through shared memory, which wakes nobody.
        """
        if condition():
            return True
        clock, pause = AwakeClock(), _FIRST_POLL_SECONDS
        end = clock.now() + deadline_seconds
        while (left := end - clock.now()) > 0:
            polls = in_memory and any(x.local_peer is not None for x in self.connections.values())
            self.changed.wait(min(left, pause if polls else 0.05))
            if condition():
                return True
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
        return False

    def wait_for(self, ranks: Collection[int], condition: Any, end: float) -> bool:
        """``wait`` until ``end``, and for another deadline whenever one of ``ranks`` has worked meanwhile.

        Members that make updates do not count: they may have left this one behind.
        """
        state, ranks = self._run_state, list(ranks)
        if state is None:
            return self.wait(condition, end - time.monotonic())

        def work_by_clock() -> dict[tuple[int, int], int]:
            all_work = state.work()
            return {(rank, state.clock(rank)): int(all_work[rank]) for rank in ranks}

        work = work_by_clock()
        while not self.wait(condition, end - time.monotonic()):
            before, work = work, work_by_clock()
            if not any(work[x] > before.get(x, work[x]) for x in work):
                return False
            end = time.monotonic() + self.deadline_seconds
        return True

    def dead(self, rank: int) -> bool:
        """Whether ``rank`` is known to be dead, and all that it sent has arrived."""
        if rank == self.rank:
            return False
        connection = self.connections[rank]
        return connection.dead or (self._is_marked_dead(rank) and not connection.connected)

    def gone(self, rank: int) -> bool:
        """Whether ``rank`` is dead or has finished, so that there is no use in waiting for it."""
        if rank == self.rank:
            return False
        connection = self.connections[rank]
        ended = self.has_finished(rank) and not connection.connected
        return self.dead(rank) or connection.finished or ended

    def has_finished(self, rank: int) -> bool:
        """Whether ``rank`` has made its last step, by the run state; what it sent may be under way."""
        return self._run_state is not None and self._run_state.has_finished(rank)

    def out_of_reach(self, rank: int) -> bool:
        """Whether ``rank`` has been silent for half of the deadline of a collective."""
        return rank != self.rank and self.connections[rank].silent_seconds > self.deadline_seconds / 2

    def has_lost(self, rank: int) -> bool:
        """Whether ``rank`` is dead, or has been silent for as long as the deadline."""
        silent = rank != self.rank and self.connections[rank].silent_seconds > self.deadline_seconds
        return silent or self.dead(rank)

    def living(self) -> Sequence[int]:
        with self.lock:
            return [rank for rank in range(self.size) if rank == self.rank or self._is_alive(rank)]

    def _is_alive(self, rank: int) -> bool:
        return not (self._is_marked_dead(rank) or self.dead(rank) or self.connections[rank].silent)

    def _is_marked_dead(self, rank: int) -> bool:
        """Whether the launcher has marked ``rank`` dead in the run state."""
        return self._run_state is not None and not self._run_state.is_alive(rank)

    # -- the end ------------------------------------------------------------------------------------

    def close(self, linger_seconds: float) -> None:
        """See ``NetworkFabric.close``."""
        with self.lock:
            if self.closed:
                return
            for connection in self.connections.values():
                connection.post(Frame(Kind.FINISHED))

            def nobody_waits() -> bool:
                return all(
                    self.dead(x.peer) or (x.finished and not (x.queue and x.connected))
                    for x in self.connections.values()
                )

            if not self.wait(nobody_waits, linger_seconds):
                late = [x.peer for x in self.connections.values() if x.queue and not self.dead(x.peer)]
                if late:
                    log.warning("rank(s) %s did not receive all messages within %g s", late, linger_seconds)
        self._close_connections()

    def _close_connections(self) -> None:
        with self.lock:
            self.closed = True
            self.notify()
        self._listener.close(_JOIN_SECONDS)
        for connection in self.connections.values():
            connection.close()
        for connection in self.connections.values():
            connection.join(_JOIN_SECONDS)


def digest(*names: object, size_bytes: int = 8) -> bytes:
    """A digest of fixed length, by which a channel or a run is identified in messages."""
    text = "\0".join(str(name) for name in names).encode()
    return hashlib.blake2b(text, digest_size=size_bytes).digest()
