"""The handshake of two members: Noise_KKpsk0_25519_AESGCM_SHA256, or ChaChaPoly instead of AESGCM.

It follows the Noise Protocol Framework (Perrin, revision 34), sections 5, 7 and 9, and uses its names. Each
side knows the other's static key from the rendezvous; the run's secret is the pre-shared key.

    -> s                    both in the transcript before the first message
    <- s
    ...
    -> psk, e, es, ss
    <- e, ee, se

So only members that have the secret and their own static key get the keys of the connection. These are
forward-secret: if static keys and the secret leak later, what was sent before stays unreadable.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from murmurate.fabric.network.crypto import TAG_BYTES, AeadStream

KEY_BYTES = 32
_MESSAGES = (("psk", "e", "es", "ss"), ("e", "ee", "se"))
_NAMES = {"aes-256-gcm": "AESGCM", "chacha20-poly1305": "ChaChaPoly"}


def message_bytes(payload_bytes: int) -> int:
    """The length of each of the two messages: an ephemeral key, and the sealed payload."""
    return KEY_BYTES + payload_bytes + TAG_BYTES


class Noise:
    """One side of a handshake: the initiator writes, then reads; the responder reads, then writes.

    psk: pre-shared key [32]. prologue: bytes that must be the same on both sides. static: our own static key;
    their_static: the peer's public one [32]. ephemeral: our ephemeral key, given only in tests, else
    generated.
    """

    def __init__(
        self,
        initiates: bool,
        cipher: str,
        psk: bytes,
        prologue: bytes,
        static: X25519PrivateKey,
        their_static: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self._initiates, self._cipher, self._psk = initiates, cipher, psk
        self._mine = {"s": static, "e": ephemeral or X25519PrivateKey.generate()}
        self._theirs = {"s": X25519PublicKey.from_public_bytes(their_static)}
        self._messages = iter(_MESSAGES)
        name = f"Noise_KKpsk0_25519_{_NAMES[cipher]}_SHA256".encode()
        self._hash = name.ljust(32, b"\0") if len(name) <= 32 else hashlib.sha256(name).digest()
        self._chaining_key = self._hash
        self._mix_hash(prologue)
        own = static.public_key().public_bytes_raw()
        for key in (own, their_static) if initiates else (their_static, own):
            self._mix_hash(key)

    def write(self, payload: bytes) -> bytes:
        """The next message. Raises ValueError for a public key of small order."""
        public = self._mine["e"].public_key().public_bytes_raw()
        self._mix_tokens(next(self._messages), public)
        sealed = self._stream.seal(payload, self._hash)
        self._mix_hash(sealed)
        return public + sealed

    def read(self, message: bytes) -> bytes:
        """The payload of the peer's message. Raises InvalidTag, or ValueError for a public key of small order
        or of fewer than 32 bytes."""
        public, sealed = message[:KEY_BYTES], message[KEY_BYTES:]
        self._theirs["e"] = X25519PublicKey.from_public_bytes(public)
        self._mix_tokens(next(self._messages), public)
        payload = self._stream.open(sealed, self._hash)
        self._mix_hash(sealed)
        return payload

    def split(self) -> tuple[bytes, bytes]:
        """(key to send with, key to receive with), after both messages."""
        first, second = self._hkdf(b"", 2)
        return (first, second) if self._initiates else (second, first)

    def _mix_tokens(self, tokens: tuple[str, ...], public: bytes) -> None:
        for token in tokens:
            if token == "psk":
                self._chaining_key, mixed, key = self._hkdf(self._psk, 3)
                self._mix_hash(mixed)
                self._stream = AeadStream(key, cipher=self._cipher)
            elif token == "e":
                self._mix_hash(public)
                self._mix_key(public)  # Noise requires this in handshakes with a pre-shared key
            else:  # "es", "ee", "ss" or "se": the initiator's key, then the responder's
                mine, theirs = (token[0], token[1]) if self._initiates else (token[1], token[0])
                self._mix_key(self._mine[mine].exchange(self._theirs[theirs]))

    def _mix_key(self, material: bytes) -> None:
        self._chaining_key, key = self._hkdf(material, 2)
        self._stream = AeadStream(key, cipher=self._cipher)

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _hkdf(self, material: bytes, count: int) -> list[bytes]:
        derived = HKDF(hashes.SHA256(), 32 * count, salt=self._chaining_key, info=b"").derive(material)
        return [derived[start : start + 32] for start in range(0, len(derived), 32)]
