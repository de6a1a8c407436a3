"""A member's port under half-open connections of strangers."""

from __future__ import annotations

import socket
import time

import pytest

from murmurate.errors import Refusal
from murmurate.fabric.network import listener
from murmurate.fabric.network.listener import Listener


def test_expired_connections_make_room_and_no_other_is_closed(monkeypatch) -> None:
    """The limits count those that stay open: here six strangers have expired, and three have just come."""
    monkeypatch.setattr(listener, "_SWEEP_SECONDS", 600.0)  # room is made here alone
    refused: list[str] = []
    made = Listener("127.0.0.1", 2, lambda sock, seconds: None, lambda cause, words: refused.append(cause))
    pairs = [socket.socketpair() for _ in range(9)]
    now = time.monotonic()
    try:
        half_open = {pair[0]: ("10.0.0.1", now - 60.0) for pair in pairs[:6]}
        half_open |= {pair[0]: ("10.0.0.1", now) for pair in pairs[6:]}
        made._half_open = dict(half_open)
        made._make_room()
        assert list(made._half_open) == [pair[0] for pair in pairs[6:]]
        assert refused == []
        made._half_open = dict.fromkeys(half_open, ("10.0.0.1", now))
        made._make_room()
        assert list(made._half_open) == [pair[0] for pair in pairs[3:]], "the oldest go; 2 + 4 may stay"
        assert refused == ["crowd"] * 3
    finally:
        made._half_open = {}
        made.close(5.0)
        for one, other in pairs:
            one.close()
            other.close()


def test_an_address_of_another_host_is_refused_with_the_variable_that_names_one() -> None:
    with pytest.raises(Refusal, match=r"cannot listen at 192\.0\.2\.1 .* Set MURMURATE_ADDRESS"):
        Listener("192.0.2.1", 2, lambda sock, seconds: None, lambda cause, words: None)
