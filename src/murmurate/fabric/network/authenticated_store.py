"""Values in a c10d store that only members who share a secret can write.

The store itself is open: whoever reaches its port reads, writes and deletes. So each value carries a keyed
BLAKE2b digest of its place (run, epoch and key), a sequence number that only rises, and its content. What was
made without the secret, moved from another place, or brought back after a newer value, is not believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import struct
from collections.abc import Sequence
from typing import Any

from murmurate.fabric.interface import FabricError

log = logging.getLogger("murmurate.fabric.network.fabric")

_DIGEST_BYTES = 32
_SEQUENCE = struct.Struct("<Q")
_HEAD_BYTES = _DIGEST_BYTES + _SEQUENCE.size


class Unauthentic(FabricError):
    """A value was not written by a member. ``content``: what it claims; not to be believed."""

    def __init__(self, place: str, problem: str, content: bytes) -> None:
        super().__init__(f"'{place}' in the run's store {problem}")
        self.content = content
        self._given = place, problem, content

    def __reduce__(self) -> tuple[type[Unauthentic], tuple[str, str, bytes]]:
        return Unauthentic, self._given


class AuthenticatedStore:
    """The part of ``store`` below ``place``, which names run and epoch. Each key has one writer.

    secret: b"" where the members have none; then anyone can write, but members with a secret do not believe
    members without.
    """

    def __init__(self, store: Any, place: str, secret: bytes) -> None:
        self._store, self._place, self._secret = store, place, secret
        self._key = hashlib.blake2b(secret, digest_size=64, person=b"murmurate store").digest()
        self._written: dict[str, int] = {}  # sequence numbers
        self._read: dict[str, int] = {}
        self.refused = 0

    def part(self, name: str) -> AuthenticatedStore:
        return AuthenticatedStore(self._store, f"{self._place}/{name}", self._secret)

    def clone(self) -> AuthenticatedStore:
        """The same over a connection of its own."""
        return AuthenticatedStore(self._store.clone(), self._place, self._secret)

    def set(self, key: str, content: bytes) -> None:
        if key not in self._written:  # an earlier process may have written it
            with contextlib.suppress(Unauthentic):
                self._written[key] = self._sequence_of(key) if self.check(key) else 0
        number = self._written[key] = self._written.get(key, 0) + 1
        head = _SEQUENCE.pack(number)
        self._store.set(self._at(key), self._digest(key, head + content) + head + content)

    def check(self, key: str) -> bool:
        return bool(self._store.check([self._at(key)]))

    def wait(self, key: str, timeout: Any) -> None:
        """Raises RuntimeError at the timeout."""
        self._store.wait([self._at(key)], timeout)

    def get(self, key: str) -> bytes:
        """Raises Unauthentic."""
        return self.opened(key, self._store.get(self._at(key)))

    def find(self, key: str) -> bytes | None:
        """None where no member has written it."""
        try:
            return self.get(key) if self.check(key) else None
        except Unauthentic as problem:
            self.refuse(problem)
            return None

    def refuse(self, problem: Unauthentic) -> None:
        """Count it; log the 1st, 2nd, 4th, 8th ..., so that the log stays short."""
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning("refused [store, no. %d]: %s", self.refused, problem)

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """The stored values, read in one request and not authenticated yet (see ``opened``)."""
        return list(self._store.multi_get([self._at(key) for key in keys]))

    def opened(self, key: str, value: bytes) -> bytes:
        """The content of a value of ``key``. Raises Unauthentic."""
        number, content = self._authenticated(key, value)
        if number < self._read.get(key, 0):
            raise Unauthentic(self._at(key), "is older than one that was there before", content)
        self._read[key] = number
        return content

    def _authenticated(self, key: str, value: bytes) -> tuple[int, bytes]:
        """(sequence number, content). Raises Unauthentic."""
        signed, content = value[_DIGEST_BYTES:], value[_HEAD_BYTES:]
        if len(value) < _HEAD_BYTES or not hmac.compare_digest(
            value[:_DIGEST_BYTES], self._digest(key, signed)
        ):
            raise Unauthentic(self._at(key), "was not written with this run's secret", content)
        return _SEQUENCE.unpack_from(signed)[0], content

    def _sequence_of(self, key: str) -> int:
        return self._authenticated(key, self._store.get(self._at(key)))[0]

    def _at(self, key: str) -> str:
        return f"{self._place}/{key}"

    def _digest(self, key: str, signed: bytes) -> bytes:
        place = self._at(key).encode()
        text = len(place).to_bytes(8, "little") + place + signed
        return hashlib.blake2b(text, key=self._key, digest_size=_DIGEST_BYTES).digest()
