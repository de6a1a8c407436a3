"""The connection to one peer, which reconnects by itself, and neither loses nor repeats a message.

Two kinds of data are sent. *Numbered frames* (mail, parts of collectives) are kept until the peer has
acknowledged them; on a new connection each side reports how many it has received, and the other continues
from there. *State* (acknowledgements, requests, how much mail was read) is a map from keys to newest values:
changes are sent as they happen, and all values again on a new connection.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from murmurate.fabric.network.compression import WireCopy
from murmurate.fabric.network.crypto import PeerRecord
from murmurate.fabric.network.frames import (
    NUMBERED,
    Closed,
    Frame,
    FrameRejected,
    FrameWriter,
    Kind,
    Pipe,
    SilenceTimeout,
)
from murmurate.fabric.network.handshake import Handshake, dial, may_listen
from murmurate.fabric.network.send_queue import SendQueue, state_of
from murmurate.fabric.network.shm_peer import ShmPeer

if TYPE_CHECKING:
    from murmurate.fabric.network.endpoint import Endpoint

log = logging.getLogger("murmurate.fabric.network.fabric")

_HEARTBEATS = 6  # sent within ``silence_seconds``; without a byte for that long, the peer closes a connection
_DIAL_SECONDS = 2.0
_DIRECT_BYTES = 2 << 20  # the largest frame that the posting thread sends itself (see ``claim``)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0  # between attempts to reconnect
_GRACE_SECONDS = 1.0  # how long a lost connection may take to come back before its peer counts as silent


class PeerConnection:
    """One end of a connection. ``post`` and ``announce`` never wait; two threads send and receive.

    While the connection is idle, a thread with a small frame may ``claim`` it and send the frame itself, so
    that no thread has to be woken; the sending thread writes what the socket's buffer does not take. A large
    frame is left to the sending thread, which sends it while the posting thread still copies the payload.
    """

    def __init__(self, owner: Endpoint, record: PeerRecord) -> None:
        self.record = record
        self.peer = record.rank
        self.dead = False  # the peer's host says that no process listens there any more
        self.finished = False  # the peer will take no further part
        self.received = 0  # number of the last numbered frame that has arrived
        self.times_connected = 0
        self.local_peer: ShmPeer | None = None  # decided once for each incarnation: see ``adopt``
        self._owner = owner
        self._dials = owner.credentials.rank > record.rank
        self._heartbeat_seconds = owner.credentials.silence_seconds / _HEARTBEATS
        self._work = threading.Condition(owner.lock)
        self._pipe: Pipe | None = None
        self._half_open = False  # sending failed; frames that the peer sent before may still be read
        self._lost_at = time.monotonic()
        self.queue = SendQueue()  # to be used with the lock held
        self._register_next = False  # whether it is the turn of a register's vector to be sent
        self._has_connected = False  # to this incarnation of the peer
        self._claimed = False  # a thread other than the sending thread is writing
        self._writing = False  # the sending thread is writing
        self._nudged = False  # see ``nudge``
        self._unfinished: tuple[Pipe, FrameWriter] | None = None  # a frame begun in ``send_claimed``
        self._sender = threading.Thread(target=self._send, name=f"connection-{self.peer}", daemon=True)
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        self._sender.start()

    # -- used by the member (with the lock held) ----------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._pipe is not None

    @property
    def silent_seconds(self) -> float:
        """How long there has been no connection; 0 while connected."""
        return 0.0 if self._pipe is not None else time.monotonic() - self._lost_at

    @property
    def silent(self) -> bool:
        return self.silent_seconds > _GRACE_SECONDS

    def post(self, frame: Frame) -> None:
        """Send a numbered frame exactly once, in order, across reconnects; its payload must not change."""
        self.queue.keep(frame)
        self._work.notify()

    def claim(self, frame: Frame) -> Pipe | None:
        """Reserve the connection for a small frame, which is numbered as by ``post``; the caller must then
        call ``send_claimed``. None if the connection is busy or the frame large: then it must be posted.
        """
        if (
            frame.length > _DIRECT_BYTES
            or self._claimed
            or self._writing
            or self.queue.is_pending
            or self._unfinished
            or self._half_open
        ):
            return None
        if self._pipe is not None:
            self._claimed = True
            if frame.kind in NUMBERED:
                self.queue.keep(frame, sent=True)
        return self._pipe

    def send_claimed(self, pipe: Pipe, frame: Frame, copy: WireCopy) -> None:
        """Send ``frame``, whose payload ``copy`` provides, as far as the socket's buffer takes it.

        To be called without the lock.
        """
        unfinished = None
        try:
            writer = pipe.writer(frame, copy)
            unfinished = None if writer.write(wait=False) else (pipe, writer)
        except OSError:
            with self._owner.lock:
                self._half_open = self._half_open or self._pipe is pipe
        finally:
            copy.finish()
            with self._owner.lock:
                self._claimed = False
                # a new connection begins with all frames that were not acknowledged, so this one is dropped
                self._unfinished = unfinished if self._pipe is pipe else None
                if self._unfinished or self.queue.is_pending or self._nudged or self._pipe is not pipe:
                    self._work.notify()

    def announce(self, key: tuple[str, ...], value: Any, soon: bool = True) -> None:
        """Set the newest ``value`` of ``key`` for the peer; older values may never be sent.

        soon: whether to send it now, or with the next frame (a heartbeat at the latest).
        """
        self.queue.announce(key, value)
        if soon:
            self._work.notify()

    def nudge(self) -> None:
        """Wake the sending thread: there may be a vector for this peer now."""
        self._nudged = True
        self._work.notify()

    # -- connections --------------------------------------------------------------------------------

    def adopt(self, handshake: Handshake) -> None:
        """Continue over a new connection, which replaces any older one.

        The first connection to an incarnation of the peer decides whether that incarnation is local, so a
        reconnect changes nothing about shared memory.
        """
        with self._owner.lock:
            # this member has closed, or the peer has restarted, during the handshake
            if self._owner.closed or handshake.incarnation != self.record.incarnation:
                handshake.pipe.close()
                raise Closed
            if handshake.received > self.queue.posted:
                handshake.pipe.close()
                raise FrameRejected("number", f"rank {self.peer} acknowledges frames that were never sent")
            old, self._pipe = self._pipe, handshake.pipe
            self._half_open = False
            self._acknowledge(handshake.received)
            self._unfinished = None
            self.queue.resend_all()
            self.times_connected += 1
            if self.dead or self.times_connected > 1:
                log.warning("rank %d is back (connection %d)", self.peer, self.times_connected)
            self.dead = False
            if not self._has_connected:
                self._has_connected = True
                self.local_peer = handshake.pipe.local_peer if handshake.pipe.peer_reads else None
                if self.local_peer is not None:
                    self._owner.local_peer_found(self)
            reader = threading.Thread(target=self._read, args=(handshake.pipe,), daemon=True)
            self._readers = [r for r in self._readers if r.is_alive()] + [reader]
            reader.start()
            self._work.notify()
            self._owner.notify()
        if old is not None:
            old.close()

    def replace(self, record: PeerRecord) -> None:
        """The peer has restarted: forget all that was exchanged with its former incarnation."""
        with self._owner.lock:
            log.warning(
                "rank %d has restarted: %d unread message(s) to its former process are dropped",
                self.peer,
                len(self.queue),
            )
            old, self._pipe, self._lost_at = self._pipe, None, time.monotonic()
            self.record, self.dead, self.finished = record, False, False
            self.local_peer, self._has_connected = None, False
            self.received = 0
            self.queue.clear()
            self._owner.peer_restarted(self)
        if old is not None:
            old.close()

    def close(self) -> None:
        with self._owner.lock:
            pipe, self._pipe = self._pipe, None
            self._work.notify()
        if pipe is not None:
            pipe.close()

    def join(self, seconds: float) -> None:
        for thread in [self._sender, *self._readers]:
            if thread.is_alive():
                thread.join(seconds)

    # -- the sending thread -------------------------------------------------------------------------

    def _send(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._owner.closed:
            if self._pipe is None:
                self._reconnect()
                with self._owner.lock:
                    if self._pipe is None and not self._owner.closed:
                        self._work.wait(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
                continue
            pause = _FIRST_PAUSE_SECONDS
            self._send_next()

    def _send_next(self) -> None:
        with self._owner.lock:
            pipe = self._pipe
            if pipe is None:
                return
            writer = None if self._half_open or self._claimed else self._next_writer(pipe)
            if writer is None:
                woken = self._work.wait(self._heartbeat_seconds)
                if woken or self._half_open or self._claimed or self._pipe is not pipe:
                    return
                writer = self._next_writer(pipe) or pipe.writer(Frame(Kind.CONTROL))
            self._writing = True
        try:
            writer.write()
        except OSError:
            with self._owner.lock:  # the reader can still read what has arrived, and then closes ``pipe``
                self._half_open = self._pipe is pipe
        finally:
            with self._owner.lock:
                self._writing = False

    def _next_writer(self, pipe: Pipe) -> FrameWriter | None:
        """The writer of the next frame; before that, of a frame that another thread has begun on ``pipe``."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None and unfinished[0] is pipe:
            return unfinished[1]
        frame = self._next_frame()
        return None if frame is None else pipe.writer(frame)

    def _next_frame(self) -> Frame | None:
        """State first, as it is small; then numbered frames and vectors in turn."""
        self._nudged = False
        state = self.queue.next_state()
        if state is not None:
            return state
        vector = self._owner.next_register_frame(self) if self._register_next else None
        self._register_next = vector is None and self.queue.has_frames
        return vector or self.queue.next_frame() or self._owner.next_register_frame(self)

    def _reconnect(self) -> None:
        """Dial, if this is the side that dials; else test whether the peer's process still listens."""
        if not self._dials:
            # a restarted peer dials us
            if self.times_connected and not self.dead and not may_listen(self.record, _DIAL_SECONDS):
                self._note_dead()
            return
        try:
            self.adopt(dial(self._owner.credentials, self.record, self.received, _DIAL_SECONDS))
        except ConnectionRefusedError:  # before the first connection the address may simply be wrong
            if not self._replace_if_restarted() and self.times_connected:
                self._note_dead()
        except FrameRejected as refusal:
            self._owner.refuse(refusal.cause, str(refusal), self.peer)
            self._replace_if_restarted()
        except Closed:  # the peer is not ready, or is another process now, which cannot read our handshake
            self._replace_if_restarted()
        except OSError:
            pass

    def _replace_if_restarted(self) -> bool:
        record = self._owner.current_record(self.peer)
        restarted = record is not None and record.incarnation != self.record.incarnation
        if record is not None and restarted:
            self.replace(record)
        return restarted

    def _note_dead(self) -> None:
        """Mark the peer dead, unless it has connected meanwhile."""
        with self._owner.lock:
            if self._pipe is not None or self.dead or self._owner.closed:
                return
            self.dead = True
            if not self.finished:
                log.warning("rank %d is gone: no process listens at its address", self.peer)
            self._owner.notify()

    # -- the receiving thread -----------------------------------------------------------------------

    def _read(self, pipe: Pipe) -> None:
        owner = self._owner
        silent_seconds = 0.0
        try:
            while True:
                frame = pipe.receive(owner.allocate_payload)
                with owner.lock:
                    if self._pipe is not pipe:
                        return
                    self._handle_frame(frame)
        except FrameRejected as refusal:
            with owner.lock:
                if self._pipe is pipe and not owner.closed:
                    owner.refuse(refusal.cause, str(refusal), self.peer)
        except SilenceTimeout:
            silent_seconds = owner.credentials.silence_seconds
        except (Closed, OSError, ValueError):
            pass
        finally:
            pipe.close()
            with owner.lock:
                if self._pipe is pipe:
                    self._pipe = None
                    self._lost_at = time.monotonic() - silent_seconds
                    if not owner.closed and not self.finished:
                        log.info("the connection to rank %d is lost", self.peer)
                    self._work.notify()
                    owner.notify()

    def _handle_frame(self, frame: Frame) -> None:
        self._owner.notify()  # first, so that threads waiting for it continue before the reply is sent
        if frame.kind is Kind.CONTROL:
            for key, value in state_of(frame):
                if key == ("received",):
                    self._acknowledge(int(value))
                else:
                    self._owner.receive_announcement(self, key, value)
            return
        if frame.kind in NUMBERED:
            if frame.number <= self.received:
                self._owner.refuse("duplicate", f"message {frame.number} arrived twice", self.peer)
                return
            if frame.number != self.received + 1:
                raise FrameRejected("number", f"message {frame.number} arrived after {self.received}")
        self._owner.deliver(self, frame)  # may raise FrameRejected; the frame then counts as not received
        if frame.kind in NUMBERED:
            self.received = frame.number
            # the peer's queue is bounded by other means, so only the last frame is acknowledged at once
            self.finished |= frame.kind is Kind.FINISHED
            self.announce(("received",), self.received, soon=self.finished)

    def _acknowledge(self, number: int) -> None:
        self.queue.acknowledge(number)
        self._owner.notify()
