"""The handshake against vectors of other implementations, and rekeying against its definition."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from murmurate.fabric.network import crypto
from murmurate.fabric.network.crypto import CIPHERS, AeadStream, InvalidTag
from murmurate.fabric.network.noise import Noise, message_bytes

# Vectors of the Haskell implementation cacophony, as snow (tests/vectors/cacophony.txt) keeps them
_PROLOGUE = "4a6f686e2047616c74"
_PSK = "54686973206973206d7920417573747269616e20706572737065637469766521"
_INITIATOR = (
    "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1",  # static, ephemeral
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
)
_RESPONDER = (
    "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893",
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
)
_INITIATOR_PUBLIC = "6bc3822a2aa7f4e6981d6538692b3cdf3e6df9eea6ed269eb41d93c22757b75a"
_RESPONDER_PUBLIC = "31e0303fd6418d2f8c0e78b91f22e8caed0fbe48656dcf4767e4834f701b8f62"
_PAYLOADS = (
    "4c756477696720766f6e204d69736573",
    "4d757272617920526f746862617264",
    "462e20412e20486179656b",
    "4361726c204d656e676572",
    "4a65616e2d426170746973746520536179",
    "457567656e2042f6686d20766f6e2042617765726b",
)
_VECTORS = {
    "aes-256-gcm": (  # Noise_KKpsk0_25519_AESGCM_SHA256
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "1f33bde990995eea7167375d6b68e2a7fa07887dd4f0f21023317d7b04fb0a67",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "e3502578269a63176a4e59632b20df3393996180e261048266e49c0c0d9240",
        "a08f4d4f142f605e9b30daa66784552576b30265889139b97f15cf",
        "5871e43af881754e8ba7def42a69c23bfc9f7d47c3c1009f8ed986",
        "9e20a696864cb0e321197abcd721538c2155073c14313c3fa243a65fef13eb0e79",
        "c4fa90a3f3e7524bdf5dce131ad0b67a0fa1eedd30f717a42596bef8f53d369b5dc94ce508",
    ),
    "chacha20-poly1305": (  # Noise_KKpsk0_25519_ChaChaPoly_SHA256
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "23f19812300a6051f02195db0722909fc920796814cfc886ab3a8083c66a5961",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "20acfe866b4ede922f007d89dbf507216d6aa8646c7fba098da374b1784d4b",
        "d213fdd768eeef05ee236c6d2983b2029bb472567a5831f4ff592c",
        "facf98016edcfc2566b16866935329b4da833dcd3bbb4173cf638e",
        "f46e7b19ebc94d697afc64b7f7d78d9b89276a6fbd438985d68c5d0261f4d4b774",
        "84119bc1a1a5f97a338c7affb30242cf3111e95c41a07d5e289b160015156a93cb70e8e73d",
    ),
}


def side(initiates: bool, cipher: str, psk: str = _PSK, prologue: str = _PROLOGUE) -> Noise:
    static, ephemeral = (
        X25519PrivateKey.from_private_bytes(bytes.fromhex(key))
        for key in (_INITIATOR if initiates else _RESPONDER)
    )
    theirs = bytes.fromhex(_RESPONDER_PUBLIC if initiates else _INITIATOR_PUBLIC)
    return Noise(initiates, cipher, bytes.fromhex(psk), bytes.fromhex(prologue), static, theirs, ephemeral)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_the_handshake_and_what_follows_are_those_of_other_implementations(cipher: str) -> None:
    messages = _VECTORS[cipher]
    initiator, responder = side(True, cipher), side(False, cipher)
    payloads = [bytes.fromhex(payload) for payload in _PAYLOADS]
    for writer, reader, payload, expected in zip(
        (initiator, responder), (responder, initiator), payloads, messages, strict=False
    ):
        message = writer.write(payload)
        assert message.hex() == expected
        assert len(message) == message_bytes(len(payload))
        assert reader.read(message) == payload
    assert initiator.split() == responder.split()[::-1]
    streams = [AeadStream(key, cipher=cipher) for key in initiator.split()]
    for number, (payload, expected) in enumerate(zip(payloads[2:], messages[2:], strict=True)):
        sealed = bytearray(len(payload) + 16)
        streams[number % 2].seal_into(payload, sealed)
        assert sealed.hex() == expected


@pytest.mark.parametrize("wrong", [{"psk": "00" * 32}, {"prologue": "00"}], ids=str)
def test_another_secret_or_hello_is_noticed_in_the_first_message(wrong: dict[str, str]) -> None:
    message = side(True, "aes-256-gcm").write(b"")
    with pytest.raises(InvalidTag):
        side(False, "aes-256-gcm", **wrong).read(message)


@pytest.mark.parametrize("message", [0, 1])
@pytest.mark.parametrize("place", [0, 31, 32, -1])
def test_every_bit_of_the_messages_counts(message: int, place: int) -> None:
    initiator, responder = side(True, "aes-256-gcm"), side(False, "aes-256-gcm")
    first = bytearray(initiator.write(b"payload"))
    if message == 0:
        first[place] ^= 1
        with pytest.raises(InvalidTag):
            responder.read(bytes(first))
        return
    responder.read(bytes(first))
    second = bytearray(responder.write(b"payload"))
    second[place] ^= 1
    with pytest.raises(InvalidTag):
        initiator.read(bytes(second))


@pytest.mark.parametrize("small", [bytes(32), b"\1" + bytes(31)])
def test_an_ephemeral_key_of_small_order_is_refused(small: bytes) -> None:
    with pytest.raises(ValueError, match="shared key"):
        side(False, "aes-256-gcm").read(small + bytes(16))


@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("cipher", CIPHERS)
def test_keys_change_as_the_framework_defines(
    cipher: str, encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Section 4.2: ENCRYPT(k, 2^64 - 1, zerolen, zeros); the nonce counts on."""
    monkeypatch.setattr(crypto, "REKEY_PIECES", 3)
    is_aes = cipher == "aes-256-gcm" or not encrypt
    function, order = (AESGCM, "big") if is_aes else (ChaCha20Poly1305, "little")
    key, piece = bytes(range(32)), b"a piece"
    sends, receives = AeadStream(key, encrypt, cipher), AeadStream(key, encrypt, cipher)
    for number in range(10):
        if number and number % 3 == 0:
            key = function(key).encrypt(bytes(4) + b"\xff" * 8, bytes(32), None)[:32]
        nonce = bytes(4) + number.to_bytes(8, order)
        if encrypt:
            sealed, out = bytearray(len(piece) + 16), bytearray(len(piece))
            sends.seal_into(piece, sealed)
            assert sealed == function(key).encrypt(nonce, piece, None)
            receives.open_into(sealed, out)
            assert out == piece
        else:
            tag = sends.tag(piece)
            assert tag == function(key).encrypt(nonce, b"", piece)
            receives.check(piece, tag)
