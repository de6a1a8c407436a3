"""Values in a c10d store that are accepted only from members who share a secret.

The store itself is open: whoever can connect to its port can read, write and delete. So each value carries a
keyed BLAKE2b digest of its place (run, epoch and key), of a sequence number that only rises, and of its
content. A value is rejected if it was made without the secret, copied from another place, or is older than
one that was read before.
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
    """A value was not written by a member, or is older than one that was read before.

    ``content``: its content, which must not be trusted.
    """

    def __init__(self, place: str, problem: str, content: bytes) -> None:
        super().__init__(f"'{place}' in the run's store {problem}")
        self.content = content
        self._arguments = place, problem, content

    def __reduce__(self) -> tuple[type[Unauthentic], tuple[str, str, bytes]]:
        return Unauthentic, self._arguments


class AuthenticatedStore:
    """The part of ``store`` whose keys begin with ``place`` (run and epoch). Each key has one writer.

    secret: b"" if the members have none; then anyone can write, but members with a secret reject what members
    without one write. refused: how many values were passed to ``refuse``.
    """

    def __init__(self, store: Any, place: str, secret: bytes) -> None:
        self._store, self._place, self._secret = store, place, secret
        self._key = hashlib.blake2b(secret, digest_size=64, person=b"murmurate store").digest()
        # by key: the sequence number of the value last written here, and of the value last read
        self._written: dict[str, int] = {}
        self._read: dict[str, int] = {}
        self.refused = 0

    def part(self, name: str) -> AuthenticatedStore:
        """The keys below ``name`` in this part, over the same connection."""
        return AuthenticatedStore(self._store, f"{self._place}/{name}", self._secret)

    def set(self, key: str, content: bytes, *, alone: bool = True) -> None:
        """Write a value, with a sequence number above that of the value before. alone: whether this object is
        the only one of this process that writes the key."""
        if not alone or key not in self._written:  # an earlier process of this writer may have written it
            with contextlib.suppress(Unauthentic):
                if self.check(key):
                    self._written[key], _ = self._split(key, self._store.get(self._full_key(key)))
        number = self._written[key] = self._written.get(key, 0) + 1
        head = _SEQUENCE.pack(number)
        self._store.set(self._full_key(key), self._digest(key, head + content) + head + content)

    def check(self, key: str) -> bool:
        """Whether there is a value, authentic or not."""
        return bool(self._store.check([self._full_key(key)]))

    def wait(self, key: str, timeout: Any) -> None:
        """Wait until there is a value. Raises RuntimeError at the timeout."""
        self._store.wait([self._full_key(key)], timeout)

    def get(self, key: str) -> bytes:
        """The content of the value of ``key``. Raises Unauthentic."""
        return self.authenticated(key, self._store.get(self._full_key(key)))

    def find(self, key: str) -> bytes | None:
        """The content of the value of ``key``; None if there is none, or if it was refused."""
        try:
            return self.get(key) if self.check(key) else None
        except Unauthentic as problem:
            self.refuse(problem)
            return None

    def refuse(self, problem: Unauthentic) -> None:
        """Count a refused value; log the 1st, 2nd, 4th, 8th ... of them, so that the log stays short."""
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning("refused [store, no. %d]: %s", self.refused, problem)

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """The stored values, read in one request and not authenticated yet (see ``authenticated``)."""
        return list(self._store.multi_get([self._full_key(key) for key in keys]))

    def authenticated(self, key: str, value: bytes) -> bytes:
        """The content of ``value``, which was stored as ``key``. Raises Unauthentic."""
        number, content = self._split(key, value)
        if number < self._read.get(key, 0):
            raise Unauthentic(self._full_key(key), "is older than one that was there before", content)
        self._read[key] = number
        return content

    def _split(self, key: str, value: bytes) -> tuple[int, bytes]:
        """(sequence number, content) of a value whose digest is right. Raises Unauthentic."""
        signed, content = value[_DIGEST_BYTES:], value[_HEAD_BYTES:]
        if len(value) < _HEAD_BYTES or not hmac.compare_digest(
            value[:_DIGEST_BYTES], self._digest(key, signed)
        ):
            raise Unauthentic(self._full_key(key), "was not written with this run's secret", content)
        return _SEQUENCE.unpack_from(signed)[0], content

    def _full_key(self, key: str) -> str:
        return f"{self._place}/{key}"

    def _digest(self, key: str, signed: bytes) -> bytes:
        full_key = self._full_key(key).encode()
        text = len(full_key).to_bytes(8, "little") + full_key + signed
        return hashlib.blake2b(text, key=self._key, digest_size=_DIGEST_BYTES).digest()
