"""Keys of members, what they publish at the rendezvous, and sealed pieces of a connection's stream.

Pieces are sealed with an AEAD whose nonce is a counter: a piece that was changed, left out, repeated or moved
is not accepted. The keys come from the handshake (see ``noise``).
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
REKEY_PIECES = 1 << 16  # of at most 1 MiB: NIST and TLS allow AES-GCM some hundred GB under one key
_LAST_COUNT = 2**64 - 1
# by name: the class; the byte order and shift with which Noise makes a 12-byte nonce of a count
CIPHERS: dict[str, Any] = {
    "aes-256-gcm": (AESGCM, "big", 0),
    "chacha20-poly1305": (ChaCha20Poly1305, "little", 32),
}

__all__ = ["CIPHERS", "TAG_BYTES", "AeadStream", "Identity", "InvalidTag", "PeerRecord"]


@dataclass(frozen=True)
class PeerRecord:
    """What a member publishes at the rendezvous: where it listens, and its public key [32 bytes]."""

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
        """Raises ValueError if it is not a record."""
        try:
            body = json.loads(text)
            key, incarnation = bytes.fromhex(body["key"]), bytes.fromhex(body["incarnation"])
            record = PeerRecord(int(body["rank"]), str(body["address"]), int(body["port"]), key, incarnation)
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"it is not a record ({problem!r})") from None
        if len(key) != 32 or len(incarnation) != 16:
            raise ValueError("its key or incarnation has the wrong length")
        return record


@dataclass
class Identity:
    """A member's own key pair, generated in each process."""

    private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    incarnation: bytes = field(default_factory=lambda: os.urandom(16))

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()


class AeadStream:
    """One direction of one connection, sealing or opening pieces in order: Noise's CipherState, with another
    key after each ``REKEY_PIECES``.

    encrypt: seal by ``cipher``; False leaves the pieces readable and only adds a tag that authenticates them
    (AES-GMAC).
    """

    def __init__(self, key: bytes, encrypt: bool = True, cipher: str = "aes-256-gcm") -> None:
        self.encrypt = encrypt
        self._cipher, self._byteorder, self._shift = CIPHERS[cipher if encrypt else "aes-256-gcm"]
        self._aead = self._cipher(key)
        self._count = 0

    def _nonce(self) -> bytes:
        """The next piece's nonce; changes the key when that is due."""
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
        """Raises InvalidTag."""
        nonce = self._nonce()
        return self._aead.decrypt(nonce, sealed, context)  # type: ignore[no-any-return]

    def tag(self, piece: Any) -> bytes:
        """[16] authenticates a piece that stays readable."""
        nonce = self._nonce()
        return self._aead.encrypt(nonce, b"", piece)  # type: ignore[no-any-return]

    def check(self, piece: Any, tag: Any) -> None:
        """Raises InvalidTag if the piece is not the one that was sent."""
        nonce = self._nonce()
        self._aead.decrypt(nonce, tag, piece)

    def seal_into(self, piece: Any, out: Any) -> None:
        """out: room for the piece and 16 bytes more."""
        nonce = self._nonce()
        self._aead.encrypt_into(nonce, piece, None, out)

    def open_into(self, sealed: Any, out: Any) -> None:
        """Raises InvalidTag; the content of ``out`` must then not be used."""
        nonce = self._nonce()
        self._aead.decrypt_into(nonce, sealed, None, out)
