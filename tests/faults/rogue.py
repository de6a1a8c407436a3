"""A member of a run, with all of its keys, that sends what no member should."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading

from fabric.networked import RUN, SECRET, board, fill
from murmurate.fabric.network.crypto import Identity, PeerRecord
from murmurate.fabric.network.endpoint import digest
from murmurate.fabric.network.frames import Closed, Frame, FrameRejected, Kind, Pipe
from murmurate.fabric.network.handshake import Credentials, dial
from waiting import until

CHANNEL = digest("model")


def credentials(rank, identity=None, run=RUN, epoch=0, secret=SECRET, encrypt=True):
    named = digest(run, size_bytes=16)
    return Credentials(rank, named, epoch, secret, identity or Identity(), encrypt, "aes-256-gcm", 1.0)


@dataclasses.dataclass
class Claim(Frame):
    """A frame that claims another length than its payload has."""

    claimed: int = 0

    @property
    def length(self):
        return self.claimed


class Rogue:
    """Rank 1, with all keys of the run and bad manners. It dials, as the higher rank does."""

    def __init__(self, store, encrypt):
        self.me = credentials(1, encrypt=encrypt)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        card = PeerRecord(1, "127.0.0.1", port, self.me.identity.public, self.me.identity.incarnation)
        board(store).set("1", card.pack())
        until(lambda: board(store).check("0"))
        self.victim = PeerRecord.read(board(store).get("0"))
        self.numbered = 0
        self.connect()

    def connect(self):
        def dialled():
            with contextlib.suppress(Closed, OSError, FrameRejected):
                self.pipe = dial(self.me, self.victim, 0, 2.0).pipe
                return True
            return False

        until(dialled)
        threading.Thread(target=self._swallow, args=(self.pipe,), daemon=True).start()

    def _swallow(self, pipe):
        """Read what comes, as otherwise the other side would fill its buffers."""
        with contextlib.suppress(Closed, OSError, FrameRejected, ValueError):
            while True:
                pipe.receive(lambda frame, length: bytearray(length))

    def message(self, value):
        self.numbered += 1
        x = memoryview(fill(value).numpy()).cast("B")
        return Frame(Kind.MAIL, CHANNEL, number=self.numbered, meta={"tag": "x"}, payload=x)

    def recorded(self, frame):
        """The bytes that would be sent for ``frame``, pieces as they are on the line."""
        ours, theirs = socket.socketpair()
        Pipe(ours, self.me.origin, self.pipe._sealer, self.pipe._opener).writer(frame).write()
        ours.close()
        data = bytearray()
        while chunk := theirs.recv(1 << 16):
            data += chunk
        theirs.close()
        return data

    def send(self, frame, origin=None, length=None):
        """origin, length: false ones for the header."""
        pipe = self.pipe
        if origin is not None:
            pipe = Pipe(pipe._socket, origin, pipe._sealer, pipe._opener)
        pipe.writer(frame if length is None else Claim(**vars(frame), claimed=length)).write()

    def close(self):
        self.pipe.close()
        self._listener.close()


def logged(caplog, cause):
    return any(f"refused [{cause}, no. 1]" in record.message for record in list(caplog.records))
