"""Members' keys, the records that they publish at the rendezvous, and the encryption of their connections.

What a connection sends is divided into pieces. Each is sealed with an AEAD whose nonce is a counter, so a
piece that was changed, left out, repeated or moved is not accepted. The keys come from the handshake
(``noise``).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

TAG_BYTES = 16
# pieces, of at most 1 MiB, under one key; TLS 1.3 allows AES-GCM about 390 GB (RFC 8446, 5.5)
REKEY_PIECES = 1 << 16
_LAST_COUNT = 2**64 - 1
# by name: the class, and the byte order and shift with which Noise turns a counter into a 12-byte nonce
CIPHERS: dict[str, Any] = {
    "aes-256-gcm": (AESGCM, "big", 0),
    "chacha20-poly1305": (ChaCha20Poly1305, "little", 32),
}

__all__ = ["CIPHERS", "TAG_BYTES", "AeadStream", "Identity", "InvalidTag", "PeerRecord"]


@dataclass(frozen=True)
class PeerRecord:
    """What a member publishes at the rendezvous: where it listens, and its public key [32 bytes].

    incarnation: random bytes [16] that identify the member's process.
    """

    rank: int
    address: str
    port: int
    key: bytes
    incarnation: bytes

    def pack(self) -> bytes:
        return json.dumps(
            {**asdict(self), "key": self.key.hex(), "incarnation": self.incarnation.hex()}
        ).encode()

    @staticmethod
    def read(text: bytes) -> PeerRecord:
        """The record that ``pack`` has written as ``text``. Raises ValueError if it is not a record."""
        try:
            body = json.loads(text)
            key, incarnation = bytes.fromhex(body["key"]), bytes.fromhex(body["incarnation"])
            record = PeerRecord(int(body["rank"]), str(body["address"]), int(body["port"]), key, incarnation)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as problem:
            raise ValueError(f"it is not a record ({problem!r})") from None
        if len(key) != 32 or len(incarnation) != 16:
            raise ValueError("its key or incarnation has the wrong length")
        if not 0 < record.port < 1 << 16:
            raise ValueError(f"its port is {record.port}")
        return record


@dataclass
class Identity:
    """A member's own key pair, and its incarnation, both generated anew in each process."""

    private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    incarnation: bytes = field(default_factory=lambda: os.urandom(16))

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()


class AeadStream:
    """One direction of one connection, which seals or opens pieces in order: Noise's CipherState, with a new
    key after every ``REKEY_PIECES`` pieces.

    encrypt: whether to encrypt pieces, by ``cipher``; False leaves them readable and only adds a tag that
    authenticates them (AES-GMAC).
    """

    def __init__(self, key: bytes, encrypt: bool = True, cipher: str = "aes-256-gcm") -> None:
        self.encrypt = encrypt
        self._cipher, self._byteorder, self._shift = CIPHERS[cipher if encrypt else "aes-256-gcm"]
        self._aead = self._cipher(key)
        self._count = 0

    def _nonce(self) -> bytes:
        """The nonce of the next piece. Changes the key when that is due."""
        count = self._count
        if not count % REKEY_PIECES and count:
            last = (_LAST_COUNT << self._shift).to_bytes(12, self._byteorder)
            self._aead = self._cipher(self._aead.encrypt(last, bytes(32), None)[:32])
        self._count = count + 1
        nonce: bytes = (count << self._shift).to_bytes(12, self._byteorder)
        return nonce

    def seal(self, text: bytes, context: bytes) -> bytes:
        nonce = self._nonce()
        return self._aead.encrypt(nonce, text, context)  # type: ignore[no-any-return]

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """The piece that ``seal`` has sealed. Raises InvalidTag."""
        nonce = self._nonce()
        return self._aead.decrypt(nonce, sealed, context)  # type: ignore[no-any-return]

    def tag(self, piece: Any) -> bytes:
        """A tag [16 bytes] that authenticates a piece which stays readable."""
        nonce = self._nonce()
        return self._aead.encrypt(nonce, b"", piece)  # type: ignore[no-any-return]

    def check(self, piece: Any, tag: Any) -> None:
        """Raises InvalidTag if the piece is not the one for which the peer made ``tag``."""
        nonce = self._nonce()
        self._aead.decrypt(nonce, tag, piece)

    def seal_into(self, piece: Any, out: Any) -> None:
        """Seal a piece into ``out``, which is longer than it by 16 bytes."""
        nonce = self._nonce()
        self._aead.encrypt_into(nonce, piece, None, out)

    def open_into(self, sealed: Any, out: Any) -> None:
        """Open a piece into ``out``. Raises InvalidTag; the content of ``out`` must then not be used."""
        nonce = self._nonce()
        self._aead.decrypt_into(nonce, sealed, None, out)
