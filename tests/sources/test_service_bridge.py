"""A sampler and a shard over a connection: rows and errors arrive, and a new connection repeats nothing."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
from collections.abc import Iterator

import pytest

from murmurate.fabric.network.frames import Closed, FrameRejected
from murmurate.sources.service_bridge import Bridges, dial_bridge
from murmurate.sources.service_links import MESSAGE_BYTES, DrawReply, DrawRequest, ShardAddress, Stream
from murmurate.sources.service_slots import BatchSlots, SlotLayout
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(2 * DEADLINE_SECONDS)
LAYOUT = SlotLayout(slots=2, block=3, batch=5, parts=2, columns=(("keys", 8), ("seen", 3), ("errors", 4)))
STREAM = Stream(1, 0, "token")


def empty() -> BatchSlots:
    return BatchSlots(memoryview(bytearray(LAYOUT.size_bytes)), LAYOUT)


@pytest.fixture
def shard() -> Iterator[tuple[Bridges, ShardAddress]]:
    address = ShardAddress(0, 0, "a shard", "127.0.0.1", 0, secrets.token_hex(32))
    bridges = Bridges(address)
    yield bridges, dataclasses.replace(address, port=bridges.port)
    os.close(bridges.arrived)


def received(link: socket.socket) -> bytes:
    link.settimeout(DEADLINE_SECONDS)
    return link.recv(MESSAGE_BYTES)


def part_bytes(slots: BatchSlots, column: str, slot: int, part: int) -> list[memoryview]:
    return [slots.bytes_of(column, slot, LAYOUT.rows(part, number)) for number in range(LAYOUT.block)]


def write(slots: BatchSlots, column: str, slot: int, part: int) -> list[bytes]:
    """Random bytes into a part; what they are."""
    written = [os.urandom(rows.nbytes) for rows in part_bytes(slots, column, slot, part)]
    for rows, text in zip(part_bytes(slots, column, slot, part), written, strict=True):
        rows[:] = text
    return written


def test_rows_come_and_errors_go_and_a_new_connection_goes_on(shard: tuple[Bridges, ShardAddress]) -> None:
    bridges, address = shard
    slots = empty()
    slots.begin(1)
    link, bridge = dial_bridge(address, STREAM, slots)
    ((end, mirror),) = until(bridges.accept)
    first = DrawRequest(1, 1, 1, 0, 0.4, -1.0)
    link.send(first.pack())
    assert DrawRequest.read(received(end)) == first
    drawn = {column: write(mirror, column, 1, 1) for column in ("keys", "seen")}
    mirror.fill(1, 1, 1)
    end.send(DrawReply(1, 1, 1).pack())
    assert DrawReply.read(received(link)) == DrawReply(1, 1, 1)
    assert slots.is_filled(1, 1)
    assert not slots.is_filled(1, 0)
    for column, written in drawn.items():
        assert part_bytes(slots, column, 1, 1) == written
        assert not any(map(any, part_bytes(slots, column, 1, 0) + part_bytes(slots, column, 0, 1)))
    errors = write(slots, "errors", 1, 1)
    slots.begin(1)
    link.close()
    bridge.close()
    assert received(end) == b"", "the shard sees that its sampler is gone"
    again, bridge = dial_bridge(address, STREAM, slots)
    ((end, same),) = until(bridges.accept)
    assert same is mirror, "with the marks of what was drawn"
    assert same.mark(1, 1) == 1
    second = DrawRequest(1, 1, 2, 0b111, 0.5, 0.6)
    again.send(second.pack())
    assert DrawRequest.read(received(end)) == second
    assert part_bytes(mirror, "errors", 1, 1) == errors
    again.close()
    bridge.close()
    other, bridge = dial_bridge(address, dataclasses.replace(STREAM, token="a new learner"), empty())
    ((_, fresh),) = until(bridges.accept)
    assert fresh is not mirror
    other.close()
    bridge.close()


def test_an_answer_to_an_older_draw_is_not_written(shard: tuple[Bridges, ShardAddress]) -> None:
    bridges, address = shard
    slots = empty()
    link, bridge = dial_bridge(address, STREAM, slots)
    ((end, mirror),) = until(bridges.accept)
    for _ in range(2):
        slots.begin(0)
    write(mirror, "seen", 0, 0)
    end.send(DrawReply(0, 0, 1).pack())
    assert DrawReply.read(received(link)).number == 1
    assert not any(slots.memory[slots.start("keys", 0) :])
    assert slots.mark(0, 0) == 0
    link.close()
    bridge.close()


def test_who_does_not_know_the_key_is_not_let_in(shard: tuple[Bridges, ShardAddress]) -> None:
    bridges, address = shard
    stranger = dataclasses.replace(address, key=secrets.token_hex(32))
    with pytest.raises((OSError, Closed, FrameRejected)):
        dial_bridge(stranger, STREAM, empty())
    assert bridges.accept() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_that_cannot_be_written_ends_the_connection(shard: tuple[Bridges, ShardAddress]) -> None:
    """Else the sampler would wait for it for ever, as the heartbeats go on."""
    bridges, address = shard
    link, bridge = dial_bridge(address, STREAM, empty())
    ((end, _),) = until(bridges.accept)
    end.send(DrawReply(LAYOUT.slots + 7, 0, 1).pack())
    assert received(link) == received(end) == b""
    link.close()
    bridge.close()
