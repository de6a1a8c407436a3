"""The port at which a member listens. Strangers can neither close it nor keep other members from connecting.

A connection is half-open until its handshake has ended. The duration of half-open connections is limited, and
so is their number, in total and for each address. A member's handshake takes milliseconds, so if there are
too many, the oldest one of the address with the most is closed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from murmurate.errors import Refusal, cause_of

_HANDSHAKE_SECONDS = 5.0
# half-open connections that are allowed, beyond one for each member: from one address, and in total
_SPARE_OF_ADDRESS, _SPARE = 4, 16
_SWEEP_SECONDS = 0.25  # between two checks of the limits


class Listener:
    """Accepts connections until ``close``, and calls ``authenticate`` for each in a thread of its own.

    members: number of members of the run. refuse: called with a cause and a sentence, from any thread, when
    there are too many half-open connections, or none can be accepted at present.

    Raises Refusal if this host cannot listen at ``address``.
    """

    def __init__(
        self,
        address: str,
        members: int,
        authenticate: Callable[[socket.socket, float], None],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._authenticate, self._refuse = authenticate, refuse
        self._limit, self._limit_of_address = members + _SPARE, members + _SPARE_OF_ADDRESS
        self._lock = threading.Lock()
        self._half_open: dict[socket.socket, tuple[str, float]] = {}  # address and time; oldest first
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, 0), family=family, backlog=members + _SPARE)
        except OSError as error:
            raise Refusal(
                f"this host cannot listen at {address} ({cause_of(error)}). Set MURMURATE_ADDRESS to "
                "an address of this host at which the other hosts reach it, or leave it out."
            ) from error
        self._socket.settimeout(_SWEEP_SECONDS)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                sock, address = self._socket.accept()
                with self._lock:
                    self._half_open[sock] = str(address[0]), time.monotonic()
                threading.Thread(target=self._handle, args=(sock,), daemon=True).start()
            except TimeoutError:
                pass
            except (OSError, RuntimeError) as problem:  # no file descriptor or no thread is free at present
                if not self._closing.wait(_SWEEP_SECONDS):
                    self._refuse(
                        "resources", f"connections have to wait, as none can be accepted ({problem})"
                    )
            self._make_room()

    def _handle(self, sock: socket.socket) -> None:
        try:
            self._authenticate(sock, _HANDSHAKE_SECONDS)
        finally:
            with self._lock:
                self._half_open.pop(sock, None)

    def _make_room(self) -> None:
        """Close half-open connections that take too long and, while there are too many, the oldest from the
        address with the most."""
        oldest = time.monotonic() - _HANDSHAKE_SECONDS
        over_limit = 0
        with self._lock:
            closed = [sock for sock, (_, since) in self._half_open.items() if since < oldest]
            count = Counter(a for sock, (a, _) in self._half_open.items() if sock not in closed)
            while count and (count.total() > self._limit or max(count.values()) > self._limit_of_address):
                ((crowd, _),) = count.most_common(1)
                closed.append(
                    next(s for s, (a, _) in self._half_open.items() if a == crowd and s not in closed)
                )
                count[crowd] -= 1
                over_limit += 1
            for sock in closed:
                del self._half_open[sock]
                _shut_down(sock)
        for _ in range(over_limit):
            self._refuse("crowd", "too many connections that have not authenticated yet")

    def close(self, seconds: float) -> None:
        """Close all half-open connections, and end the thread, for which this waits at most ``seconds``."""
        self._closing.set()
        _shut_down(self._socket)  # closing alone does not wake an accept
        self._socket.close()
        with self._lock:
            for sock in self._half_open:
                _shut_down(sock)
        self._thread.join(seconds)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
