"""What a connection has to send: every frame with state is one that the peer accepts."""

from __future__ import annotations

import json

from murmurate.fabric.network.frames import META_LIMIT_BYTES
from murmurate.fabric.network.send_queue import SendQueue, state_of


def test_state_is_divided_into_frames_that_the_peer_accepts() -> None:
    """A rejected frame would be sent, and rejected, again after each reconnect."""
    queue = SendQueue()
    announced = {("entry", str(k)): "é" * 1000 for k in range(400)}  # six characters of JSON each
    for key, value in announced.items():
        queue.announce(key, value)
    queue.resend_all()
    received = {}
    while (frame := queue.next_state()) is not None:
        assert len(json.dumps(frame.meta)) <= META_LIMIT_BYTES
        received |= dict(state_of(frame))
    assert received == announced
    assert not queue.is_pending


def test_a_value_that_is_long_by_itself_is_sent_alone() -> None:
    queue = SendQueue()
    for key in ("one", "other"):
        queue.announce((key,), "x" * META_LIMIT_BYTES)
    assert [len(state_of(queue.next_state())) for _ in range(2)] == [1, 1]
    assert queue.next_state() is None
