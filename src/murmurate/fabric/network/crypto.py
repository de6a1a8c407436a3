"""Authentication and encryption: keys of members, keys of connections, and sealed pieces of a stream.

A connection's keys come from an X25519 exchange in which both sides use an ephemeral key and the key that
they published at the rendezvous (the three products of Noise's KK pattern), with the run's secret as the salt
of HKDF-SHA256 and the whole exchange as its context. So only members that know the secret get keys, and the
keys are forward-secret: leaking the long-lived key or secret does not reveal earlier traffic. Pieces are
sealed with an AEAD whose nonce is a counter: a piece that was changed, left out, repeated or moved is not
accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

TAG_BYTES = 16
CIPHERS: dict[str, Any] = {"aes-256-gcm": AESGCM, "chacha20-poly1305": ChaCha20Poly1305}

__all__ = ["CIPHERS", "TAG_BYTES", "AeadStream", "Identity", "InvalidTag", "PeerRecord", "connection_keys"]


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


def connection_keys(
    mine: X25519PrivateKey,
    ephemeral: X25519PrivateKey,
    their_key: bytes,
    their_ephemeral_bytes: bytes,
    context: bytes,
    secret: bytes,
    dials: bool,
) -> tuple[bytes, bytes]:
    """(key to send with, key to receive with), 32 bytes each. context: the hellos of both sides.

    Raises ValueError for a public key of small order.
    """
    theirs = X25519PublicKey.from_public_bytes(their_key)
    their_ephemeral = X25519PublicKey.from_public_bytes(their_ephemeral_bytes)
    products = [
        ephemeral.exchange(their_ephemeral),
        ephemeral.exchange(theirs),
        mine.exchange(their_ephemeral),
    ]
    # both sides use this order: ephemeral-ephemeral, dialler's ephemeral-listener's static,
    # dialler's static-listener's ephemeral
    if not dials:
        products[1], products[2] = products[2], products[1]
    info = b"murmurate connection 1" + hashlib.sha256(context).digest()
    both = HKDF(hashes.SHA256(), 64, salt=secret, info=info).derive(b"".join(products))
    return (both[:32], both[32:]) if dials else (both[32:], both[:32])


class AeadStream:
    """One direction of one connection: seals or opens pieces in order.

    encrypt: seal by ``cipher``; False leaves the pieces readable and only adds a tag that authenticates them
    (AES-GMAC).
    """

    def __init__(self, key: bytes, encrypt: bool = True, cipher: str = "aes-256-gcm") -> None:
        self.encrypt = encrypt
        self._aead = CIPHERS[cipher if encrypt else "aes-256-gcm"](key)
        self._count = 0

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "little")

    def tag(self, piece: Any) -> bytes:
        """[16] authenticates a piece that stays readable."""
        return self._aead.encrypt(self._nonce(), b"", piece)  # type: ignore[no-any-return]

    def check(self, piece: Any, tag: Any) -> None:
        """Raises InvalidTag if the piece is not the one that was sent."""
        self._aead.decrypt(self._nonce(), tag, piece)

    def seal_into(self, piece: Any, out: Any) -> None:
        """out: room for the piece and 16 bytes more."""
        self._aead.encrypt_into(self._nonce(), piece, None, out)

    def open_into(self, sealed: Any, out: Any) -> None:
        """Raises InvalidTag; the content of ``out`` must then not be used."""
        self._aead.decrypt_into(self._nonce(), sealed, None, out)
