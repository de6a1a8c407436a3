"""The connection to one peer: it reconnects by itself, and loses and repeats nothing on the way.

Two kinds of things are sent. *Numbered frames* (mail, parts of collectives) are kept until the peer has
acknowledged them; on a new connection each side says how many it has had, and the other goes on from there.
*State* (acknowledgements, requests, how much mail was taken) is a map from keys to newest values: what
changed is sent, and all of it on a new connection, so none of it can be missed either.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Protocol

from murmurate.fabric.network.compression import Filling
from murmurate.fabric.network.crypto import PeerRecord
from murmurate.fabric.network.frames import NUMBERED, Closed, Frame, Kind, Pipe, Refused, Sending, Silence
from murmurate.fabric.network.handshake import Credentials, Handshake, dial, listens
from murmurate.fabric.network.send_queue import SendQueue, state_of
from murmurate.fabric.network.shm_peer import ShmPeer

log = logging.getLogger("murmurate.fabric.network.fabric")

_BEATS_A_SILENCE = 6  # so many heartbeats in the time after which a silent connection is given up
_DIAL_SECONDS = 2.0
_AT_ONCE_BYTES = 2 << 20
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0
_GRACE_SECONDS = 1.0  # how long a lost connection may take to come back before its peer counts as silent


class Home(Protocol):
    """What a connection needs of its member; called with ``lock`` held unless said otherwise."""

    lock: threading.RLock
    credentials: Credentials
    closed: bool

    def room(self, connection: PeerConnection, frame: Frame, length: int) -> Any:
        """Where to put a payload (without the lock); raises Refused."""
        ...

    def deliver(self, connection: PeerConnection, frame: Frame) -> None: ...
    def announced(self, connection: PeerConnection, key: tuple[str, ...], value: Any) -> None: ...
    def due(self, connection: PeerConnection) -> Frame | None:
        """The newest version of some vector that this peer waits for."""
        ...

    def refuse(self, cause: str, words: str, rank: int | None = None) -> None: ...
    def renew(self, rank: int) -> PeerRecord | None:
        """The peer's present card (without the lock)."""
        ...

    def met(self, connection: PeerConnection) -> None:
        """The peer, in this incarnation, is our neighbour: each sees the other's memory."""
        ...

    def returned(self, connection: PeerConnection) -> None:
        """The peer was started anew."""
        ...

    def notify(self) -> None:
        """Wake those who wait for something."""
        ...


class PeerConnection:
    """One end. ``post`` and ``tell`` never wait; two threads do the sending and receiving.

    Where the line is free, whoever has something small to send may ``claim`` it and do so himself: nobody
    has to be woken. What the line does not take, the sending thread goes on with. Something large is sent by
    that thread right behind the copy that is made of it.
    """

    def __init__(self, home: Home, card: PeerRecord) -> None:
        self.card = card
        self.peer = card.rank
        self.dead = False  # its host says that nobody listens there any more
        self.finished = False  # it will take no further part
        self.received = 0
        self.times_connected = 0
        self.near: ShmPeer | None = None  # decided once for each incarnation of the peer: see ``adopt``
        self._home = home
        self._dials = home.credentials.rank > card.rank
        self._beat_seconds = home.credentials.silence_seconds / _BEATS_A_SILENCE
        self._work = threading.Condition(home.lock)
        self._pipe: Pipe | None = None
        self._half_open = False  # sending failed; what the peer sent before may still be read
        self._lost_at = time.monotonic()
        self._queue = SendQueue()
        self._register_next = False
        self._acquainted = False  # with this incarnation of the peer
        self._claimed = False  # a thread other than the keeper is sending
        self._writing = False  # the keeper is
        self._nudged = False
        self._rest: tuple[Pipe, Sending] | None = None  # what such a thread has begun
        self._keeper = threading.Thread(target=self._keep, name=f"connection-{self.peer}", daemon=True)
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        self._keeper.start()

    # -- what the member says and asks (with the lock held) -----------------------------------------

    @property
    def connected(self) -> bool:
        return self._pipe is not None

    @property
    def silent_seconds(self) -> float:
        """How long it has not been reached; 0 while connected."""
        return 0.0 if self._pipe is not None else time.monotonic() - self._lost_at

    @property
    def silent(self) -> bool:
        return self.silent_seconds > _GRACE_SECONDS

    @property
    def drained(self) -> bool:
        """Everything that was posted has arrived."""
        return not len(self._queue)

    @property
    def posted(self) -> int:
        """The number of the last frame that was."""
        return self._queue.posted

    def has_had(self, number: int) -> bool:
        """The peer has acknowledged the frame of that number."""
        return number < self._queue.first

    def post(self, frame: Frame) -> None:
        """Send once, in order, whatever happens to the connection; the payload must not change."""
        self._queue.keep(frame)
        self._work.notify()

    def claim(self, frame: Frame) -> Pipe | None:
        """``post``, if the line is free, and takes all at once: it is then the caller's, until it has called
        ``send_claimed``. Of more than that the line would stand still while the rest is copied."""
        if (
            frame.length > _AT_ONCE_BYTES
            or self._claimed
            or self._writing
            or self._queue.waits
            or self._rest
            or self._half_open
        ):
            return None
        if self._pipe is not None:
            self._claimed = True
            if frame.kind in NUMBERED:
                self._queue.keep(frame, sent=True)
        return self._pipe

    def send_claimed(self, pipe: Pipe, frame: Frame, filling: Filling) -> None:
        """Send ``frame`` with what ``filling`` brings, as far as the line takes it; without the lock."""
        rest = None
        try:
            sending = pipe.sending(frame, filling)
            rest = None if sending.go(wait=False) else (pipe, sending)
        except OSError:
            with self._home.lock:
                self._half_open = self._half_open or self._pipe is pipe
        finally:
            filling.finish()
            with self._home.lock:
                self._claimed = False
                # of a connection that is lost there is no rest: the next begins with all that has not arrived
                self._rest = rest if self._pipe is pipe else None
                if self._rest or self._queue.waits or self._nudged or self._pipe is not pipe:
                    self._work.notify()

    def announce(self, key: tuple[str, ...], value: Any, soon: bool = True) -> None:
        """Let the peer know the newest ``value`` of ``key``; older ones may never be sent.

        soon: now; else with whatever is sent next, a heartbeat at the latest.
        """
        self._queue.announce(key, value)
        if soon:
            self._work.notify()

    def nudge(self) -> None:
        """There may be a vector for this peer now."""
        self._nudged = True
        self._work.notify()

    # -- connections --------------------------------------------------------------------------------

    def adopt(self, meeting: Handshake) -> None:
        """Go on over a new connection; the newest one wins.

        The first settles for the peer's whole incarnation whether it is our neighbour, so what goes through
        memory does not change with the connection.
        """
        with self._home.lock:
            old, self._pipe = self._pipe, meeting.pipe
            self._half_open = False
            if meeting.incarnation != self.card.incarnation:
                raise RuntimeError("a connection adopts connections of its own peer")
            if meeting.received > self._queue.posted:
                self._pipe = None
                raise Refused("number", f"rank {self.peer} claims to have what was never sent")
            self._acknowledge(meeting.received)
            self._rest = None
            self._queue.say_again()
            self.times_connected += 1
            if self.dead or self.times_connected > 1:
                log.warning("rank %d is back (connection %d)", self.peer, self.times_connected)
            self.dead = False
            if not self._acquainted:
                self._acquainted = True
                self.near = meeting.pipe.neighbour if meeting.pipe.lends else None
                if self.near is not None:
                    self._home.met(self)
            reader = threading.Thread(target=self._read, args=(meeting.pipe,), daemon=True)
            self._readers = [r for r in self._readers if r.is_alive()] + [reader]
            reader.start()
            self._work.notify()
            self._home.notify()
        if old is not None:
            old.close()

    def replace(self, card: PeerRecord) -> None:
        """The peer was started anew: nothing of what went between the former one and us counts."""
        with self._home.lock:
            log.warning(
                "rank %d was started anew: %d unread message(s) to the former one are dropped",
                self.peer,
                len(self._queue),
            )
            old, self._pipe = self._pipe, None
            self.card, self.dead, self.finished = card, False, False
            self.near, self._acquainted = None, False
            self.received = 0
            self._queue.clear()
            self._home.returned(self)
        if old is not None:
            old.close()

    def close(self) -> None:
        with self._home.lock:
            pipe, self._pipe = self._pipe, None
            self._work.notify()
        if pipe is not None:
            pipe.close()

    def join(self, seconds: float) -> None:
        for thread in [self._keeper, *self._readers]:
            if thread.is_alive():
                thread.join(seconds)

    # -- the sending thread -------------------------------------------------------------------------

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._home.closed:
            if self._pipe is None:
                self._reconnect()
                with self._home.lock:
                    if self._pipe is None and not self._home.closed:
                        self._work.wait(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
                continue
            pause = _FIRST_PAUSE_SECONDS
            self._send_next()

    def _send_next(self) -> None:
        with self._home.lock:
            pipe = self._pipe
            if pipe is None:
                return
            sending = None if self._half_open or self._claimed else self._next_sending(pipe)
            if sending is None:
                woken = self._work.wait(self._beat_seconds)
                if woken or self._half_open or self._claimed or self._pipe is not pipe:
                    return
                sending = self._next_sending(pipe) or pipe.sending(Frame(Kind.CONTROL))
            self._writing = True
        try:
            sending.go()
        except OSError:
            with self._home.lock:  # the reader has the last word, as more may have come before the end
                self._half_open = self._pipe is pipe
        finally:
            with self._home.lock:
                self._writing = False

    def _next_sending(self, pipe: Pipe) -> Sending | None:
        """What somebody else has begun on this connection comes first."""
        rest, self._rest = self._rest, None
        if rest is not None and rest[0] is pipe:
            return rest[1]
        frame = self._next()
        return None if frame is None else pipe.sending(frame)

    def _next(self) -> Frame | None:
        """State first, as it is small; then numbered frames and vectors in turn."""
        self._nudged = False
        state = self._queue.next_state()
        if state is not None:
            return state
        vector = self._home.due(self) if self._register_next else None
        self._register_next = vector is None and self._queue.frames_wait
        return vector or self._queue.next_frame() or self._home.due(self)

    def _reconnect(self) -> None:
        """Dial, if that is our part; else ask the peer's host whether it is still there."""
        if not self._dials:
            if self.times_connected and not self.dead:  # a restarted peer dials us
                self._found(listens(self.card, _DIAL_SECONDS) is not False)
            return
        try:
            self.adopt(dial(self._home.credentials, self.card, self.received, _DIAL_SECONDS))
        except ConnectionRefusedError:
            card = self._home.renew(self.peer)
            if card is not None and card.incarnation != self.card.incarnation:
                self.replace(card)
            else:
                self._found(False)
        except Refused as refusal:
            with self._home.lock:
                self._home.refuse(refusal.cause, str(refusal), self.peer)
            card = self._home.renew(self.peer)
            if card is not None and card.incarnation != self.card.incarnation:
                self.replace(card)
        except (Closed, OSError):
            pass

    def _found(self, alive: bool) -> None:
        with self._home.lock:
            if alive or self._pipe is not None or self.dead or self._home.closed:
                return
            self.dead = True
            if not self.finished:
                log.warning("rank %d is gone: nobody listens at its address", self.peer)
            self._home.notify()

    # -- the receiving thread -----------------------------------------------------------------------

    def _read(self, pipe: Pipe) -> None:
        home = self._home
        silent_seconds = 0.0
        try:
            while True:
                frame = pipe.receive(lambda frame, length: home.room(self, frame, length))
                with home.lock:
                    if self._pipe is not pipe:
                        return
                    self._arrived(frame)
        except Refused as refusal:
            with home.lock:
                if self._pipe is pipe and not home.closed:
                    home.refuse(refusal.cause, str(refusal), self.peer)
        except Silence:
            silent_seconds = home.credentials.silence_seconds
        except (Closed, OSError, ValueError):
            pass
        finally:
            pipe.close()
            with home.lock:
                if self._pipe is pipe:
                    self._pipe = None
                    self._lost_at = time.monotonic() - silent_seconds
                    if not home.closed and not self.finished:
                        log.info("the connection to rank %d is lost", self.peer)
                    self._work.notify()
                    home.notify()

    def _arrived(self, frame: Frame) -> None:
        self._home.notify()  # first, so that who waits goes on before our answer is sent
        if frame.kind is Kind.CONTROL:
            for key, value in state_of(frame):
                if key == ("received",):
                    self._acknowledge(int(value))
                else:
                    self._home.announced(self, key, value)
            return
        if frame.kind in NUMBERED:
            if frame.number <= self.received:
                self._home.refuse("duplicate", f"message {frame.number} came again", self.peer)
                return
            if frame.number != self.received + 1:
                raise Refused("number", f"message {frame.number} came after {self.received}")
        self._home.deliver(self, frame)  # may refuse: then it was not received
        if frame.kind in NUMBERED:
            self.received = frame.number
            # what is kept for us is bounded by other means, so only the very last has to be told at once
            self.finished |= frame.kind is Kind.FINISHED
            self.announce(("received",), self.received, soon=self.finished)

    def _acknowledge(self, number: int) -> None:
        self._queue.acknowledge(number)
        self._home.notify()
