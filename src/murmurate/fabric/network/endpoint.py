"""A member's connections: the rendezvous, the listener, and who gets what arrives."""

from __future__ import annotations

import collections
import contextlib
import datetime
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from murmurate.buffers import Pool
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network.connection import PeerConnection
from murmurate.fabric.network.crypto import PeerRecord
from murmurate.fabric.network.frames import Closed, Frame, Kind, Refused
from murmurate.fabric.network.handshake import Credentials, answer
from murmurate.fabric.network.pending import PendingMessages
from murmurate.fabric.processes.run_state import RunState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("murmurate.fabric.network.fabric")

_HANDSHAKE_SECONDS = 5.0
_STRANGERS = 16  # handshakes at once, beyond one a member
_JOIN_SECONDS = 2.0
_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 20e-6, 500e-6  # between two looks into memory


class Receiver(Protocol):
    """A channel, as its member's connections see it; called with the lock held."""

    def room(self, frame: Frame, length: int) -> Any: ...
    def deliver(self, sender: int, frame: Frame) -> None: ...
    def announced(self, sender: int, what: str, rest: tuple[str, ...], value: Any) -> None: ...
    def due(self, peer: int) -> Frame | None: ...
    def met(self, peer: int) -> None: ...
    def returned(self, peer: int) -> None: ...


class Endpoint:
    """All connections of one member, under one lock."""

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
        self.deadline_seconds = deadline_seconds
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closed = False
        self.refused: collections.Counter[str] = collections.Counter()
        self.pool = Pool(keep=16)  # for what comes
        lender = credentials.lender
        self.wires = Pool()  # for what goes out
        # for what goes out of collectives, where a neighbour may read it
        self.parts = Pool() if lender is None else Pool(keep=16, fresh=lender.buffer)
        self.connections: dict[int, PeerConnection] = {}
        self._run_state, self._store = run_state, store
        self._channels: dict[bytes, Receiver] = {}
        self.pending = PendingMessages(size)
        self._turn: dict[int, int] = {}
        self._strangers: set[socket.socket] = set()
        self._listener = socket.create_server(
            (address, 0), family=_family(address), backlog=size + _STRANGERS
        )
        self._acceptor = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._acceptor.start()
        try:
            self._meet(address)
        except BaseException:
            self._shut()
            raise

    # -- the rendezvous -----------------------------------------------------------------------------

    def _meet(self, address: str) -> None:
        """Leave our card, wait for everybody's, and then for the connections."""
        me = self.credentials
        port = self._listener.getsockname()[1]
        card = PeerRecord(self.rank, address, port, me.identity.public, me.identity.incarnation)
        self._store.set(self._key(self.rank), card.sign(me.run, me.epoch, me.secret).decode())
        end = time.monotonic() + self.deadline_seconds
        others = [rank for rank in range(self.size) if rank != self.rank]
        cards = {rank: self._await_card(rank, end) for rank in others}
        with self.lock:
            for rank, theirs in cards.items():
                self.connections[rank] = PeerConnection(self, theirs)
            for connection in self.connections.values():
                connection.start()
            # who is late after this is silent, which everything else can cope with
            self.wait(
                lambda: all(x.connected for x in self.connections.values()), min(self.deadline_seconds, 10.0)
            )

    def _await_card(self, rank: int, end: float) -> PeerRecord:
        problem = "it has not come"
        while (left := end - time.monotonic()) > 0:
            try:
                self._store.wait([self._key(rank)], datetime.timedelta(seconds=left))
            except RuntimeError:  # torch's DistStoreError, at the deadline
                break
            card, problem = self._card(rank)
            if card is not None:
                return card
            time.sleep(min(0.05, max(left, 0.0)))
        raise FabricError(
            f"rank {self.rank} waited {self.deadline_seconds:g} s for rank {rank} at the rendezvous: "
            f"{problem}. Look at its log, and start all members with the same run id, epoch and secret."
        )

    def _card(self, rank: int) -> tuple[PeerRecord | None, str]:
        me = self.credentials
        try:
            card = PeerRecord.read(self._store.get(self._key(rank)), me.run, me.epoch, me.secret)
            if card.rank != rank:
                raise ValueError(f"it calls itself rank {card.rank}")
        except ValueError as problem:
            with self.lock:
                self.refuse("key", f"the card of rank {rank} is not taken: {problem}", rank)
            return None, str(problem)
        return card, ""

    def _key(self, rank: int) -> str:
        return f"murmurate/{self.credentials.run.hex()}/{self.credentials.epoch}/{rank}"

    def renew(self, rank: int) -> PeerRecord | None:
        try:
            return self._card(rank)[0]
        except RuntimeError:  # the store has gone; the connections need it no more
            return None

    # -- the listener -------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with self.lock:
                crowded = len(self._strangers) >= self.size + _STRANGERS
                if crowded:
                    self.refuse("crowd", "too many connections that have not said who they are")
                else:
                    self._strangers.add(line)
            if crowded:
                line.close()
            else:
                threading.Thread(target=self._greet, args=(line,), daemon=True).start()

    def _greet(self, line: socket.socket) -> None:
        """A handshake within its deadline, whatever the other side does or does not."""
        limit = threading.Timer(_HANDSHAKE_SECONDS, _hang_up, (line,))
        limit.daemon = True
        limit.start()
        try:
            meeting = answer(self.credentials, line, self._card_for, self._received_of, _HANDSHAKE_SECONDS)
            limit.cancel()
            with self.lock:
                if self.closed:
                    raise Closed
                self.connections[meeting.rank].adopt(meeting)
        except Refused as refusal:
            with self.lock:
                cause = "handshake" if refusal.cause == "truncated" else refusal.cause
                self.refuse(cause, str(refusal))
            line.close()
        except (Closed, OSError, RuntimeError):
            line.close()
        finally:
            limit.cancel()
            with self.lock:
                self._strangers.discard(line)

    def _card_for(self, rank: int, incarnation: bytes) -> PeerRecord | None:
        """The card under which that member may come in; a restarted one's is read anew."""
        connection = self.connections.get(rank)
        if connection is None:
            raise Closed  # before our own connections are made, or nobody we know: it will try again
        if connection.card.incarnation == incarnation:
            return connection.card
        card = self.renew(rank)
        if card is None or card.incarnation != incarnation:
            return None
        connection.replace(card)
        return card

    def _received_of(self, rank: int, incarnation: bytes) -> int:
        return self.connections[rank].received

    # -- what connections ask -----------------------------------------------------------------------------

    def room(self, connection: PeerConnection, frame: Frame, length: int) -> Any:
        with self.lock:
            channel = self._channels.get(frame.channel)
            if channel is not None:
                return channel.room(frame, length)
            return self.pending.room(length)

    def deliver(self, connection: PeerConnection, frame: Frame) -> None:
        if frame.kind is Kind.FINISHED:
            return
        channel = self._channels.get(frame.channel)
        if channel is not None:
            channel.deliver(connection.peer, frame)
        else:
            self.pending.keep(connection.peer, frame)

    def announced(self, connection: PeerConnection, key: tuple[str, ...], value: Any) -> None:
        if len(key) < 2:
            raise Refused("meta", f"a control message about {key}")
        channel = self._channel_named(key[1])
        if channel is not None:
            channel.announced(connection.peer, key[0], key[2:], value)
        else:
            self.pending.hear(connection.peer, key, value)

    def due(self, connection: PeerConnection) -> Frame | None:
        channels = list(self._channels.values())
        start = self._turn.get(connection.peer, 0)
        for step in range(len(channels)):
            index = (start + step) % len(channels)
            frame = channels[index].due(connection.peer)
            if frame is not None:
                self._turn[connection.peer] = index + 1
                return frame
        return None

    def refuse(self, cause: str, words: str, rank: int | None = None) -> None:
        """Count it; log the first of a cause, and then ever fewer, as strangers may try for ever."""
        self.refused[cause] += 1
        count = self.refused[cause]
        if count & (count - 1) == 0:
            who = "" if rank is None else f" (rank {rank})"
            log.warning("refused [%s, no. %d]%s: %s", cause, count, who, words)

    def met(self, connection: PeerConnection) -> None:
        for channel in self._channels.values():
            channel.met(connection.peer)

    def returned(self, connection: PeerConnection) -> None:
        self.pending.forget_announced(connection.peer)
        for channel in self._channels.values():
            channel.returned(connection.peer)

    def notify(self) -> None:
        self.changed.notify_all()

    # -- what channels ask --------------------------------------------------------------------------

    def join_channel(self, identity: bytes, channel: Receiver) -> None:
        """From now on what arrives for it goes there, beginning with what came early, where that fits."""
        with self.lock:
            if identity in self._channels:
                raise FabricError("a channel of that name exists already: give each its own")
            self._channels[identity] = channel
            for peer, frame in self.pending.take(identity):
                with self._refusing(peer):
                    channel.deliver(peer, frame)
            for peer, key, value in self.pending.take_announced(identity):
                with self._refusing(peer):
                    channel.announced(peer, key[0], key[2:], value)

    @contextlib.contextmanager
    def _refusing(self, rank: int) -> Iterator[None]:
        """What ``rank`` sent is refused here: the thread that read it has long gone on."""
        try:
            yield
        except Refused as refusal:
            self.refuse(refusal.cause, str(refusal), rank)

    def _channel_named(self, name: str) -> Receiver | None:
        try:
            return self._channels.get(bytes.fromhex(name))
        except ValueError:
            raise Refused("meta", "a control message about no channel") from None

    def wait(self, condition: Any, deadline_seconds: float, in_memory: bool = False) -> bool:
        """Wait under the lock; a death on the run state is noticed within 50 ms.

        in_memory: what a neighbour does there makes the condition true, and nobody wakes us for that.
        """
        if condition():
            return True
        end, pause = time.monotonic() + deadline_seconds, _FIRST_LOOK_SECONDS
        while (left := end - time.monotonic()) > 0:
            looks = in_memory and any(connection.near is not None for connection in self.connections.values())
            self.changed.wait(min(left, pause if looks else 0.05))
            if condition():
                return True
            pause = min(pause * 1.5, _LONGEST_LOOK_SECONDS)
        return False

    def dead(self, rank: int) -> bool:
        """Known to be dead, and nothing more can come of it."""
        if rank == self.rank:
            return False
        connection = self.connections[rank]
        return connection.dead or (self._marked(rank) and not connection.connected)

    def gone(self, rank: int) -> bool:
        """Dead, or finished: it will do nothing more that anybody waits for."""
        if rank == self.rank:
            return False
        connection, state = self.connections[rank], self._run_state
        ended = state is not None and state.has_finished(rank) and not connection.connected
        return self.dead(rank) or connection.finished or ended

    def out_of_reach(self, rank: int) -> bool:
        """Silent for half of the deadline of a collective."""
        return rank != self.rank and self.connections[rank].silent_seconds > self.deadline_seconds / 2

    def has_lost(self, rank: int) -> bool:
        """Dead, or silent for as long as the deadline."""
        silent = rank != self.rank and self.connections[rank].silent_seconds > self.deadline_seconds
        return silent or self.dead(rank)

    def living(self) -> Sequence[int]:
        with self.lock:
            return [rank for rank in range(self.size) if rank == self.rank or self._lives(rank)]

    def _lives(self, rank: int) -> bool:
        return not (self._marked(rank) or self.dead(rank) or self.connections[rank].silent)

    def _marked(self, rank: int) -> bool:
        """The launcher has marked it dead."""
        return self._run_state is not None and not self._run_state.is_alive(rank)

    # -- the end ------------------------------------------------------------------------------------

    def close(self, linger_seconds: float) -> None:
        with self.lock:
            if self.closed:
                return
            for connection in self.connections.values():
                connection.post(Frame(Kind.FINISHED))

            def over() -> bool:
                return all(
                    self.dead(x.peer) or (x.finished and (x.drained or not x.connected))
                    for x in self.connections.values()
                )

            if not self.wait(over, linger_seconds):
                late = [x.peer for x in self.connections.values() if not x.drained and not self.dead(x.peer)]
                if late:
                    log.warning("rank(s) %s have not had everything within %g s", late, linger_seconds)
        self._shut()

    def _shut(self) -> None:
        with self.lock:
            self.closed = True
            strangers = list(self._strangers)
            self.notify()
        with contextlib.suppress(OSError):  # closing alone does not wake an accept
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in strangers:
            _hang_up(line)
        for connection in self.connections.values():
            connection.close()
        for connection in self.connections.values():
            connection.join(_JOIN_SECONDS)
        self._acceptor.join(_JOIN_SECONDS)


def _hang_up(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def short(*words: object, size_bytes: int = 8) -> bytes:
    """A name for a channel or a run, of fixed length."""
    text = "\0".join(str(word) for word in words).encode()
    return hashlib.blake2b(text, digest_size=size_bytes).digest()
