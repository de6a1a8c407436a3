"""Members of one host whose memory cannot be mapped, or not all: vectors are sent, nothing else is read."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from fabric.local_peers import LIKE, near, vector
from fabric.networked import at_once, cabled, channels, members
from murmurate.fabric.network.compression import ExactCodec
from murmurate.fabric.network.shm_peer import MemoryRange, Region, ShmOwner, ShmPeer
from waiting import DEADLINE_SECONDS, until


def refuse(*_, **__):
    raise OSError("not yours")


def test_memory_that_cannot_be_mapped_is_sent_instead(monkeypatch):
    with cabled() as (fabrics, cable):
        monkeypatch.setattr(near(fabrics[1], 0), "map", refuse)
        here = fabrics[0].channel("model", LIKE)
        for value in range(12):
            assert here.send(1, "x", vector(value))
            here.publish(vector(value))
        there = fabrics[1].channel("model", LIKE)
        for value in range(30):
            assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, vector(value))
            assert here.send(1, "x", vector(12 + value))
        assert there.version(0) == 12
        assert torch.equal(there.peek(0)[0], vector(11))
        here.publish(vector(-1))
        assert there.wait_newer([0], [12], DEADLINE_SECONDS)
        assert torch.equal(there.peek(0)[0], vector(-1))
        monkeypatch.undo()
        before = fabrics[1].endpoint.connections[0].times_connected
        cable.snap()
        until(lambda: fabrics[1].endpoint.connections[0].times_connected > before, "the line stands again")
        here.publish(vector(-2))  # a reader that mapped it now would not be seen to read
        assert there.wait_newer([0], [13], DEADLINE_SECONDS)
        assert torch.equal(there.peek(0)[0], vector(-2))
        assert not there._shm.mapped
        assert fabrics[1].refused == {"memory": 1}
        assert there.send(0, "x", vector(1)), "the other way goes through memory still"
        assert torch.equal(here.wait("x", DEADLINE_SECONDS).x, vector(1))


def withdraw_while_writing(monkeypatch, fabrics, lane):
    """The next vector of member 0 is encoded before member 1 opens its channel, which finds no memory.

    Returns a list that will hold the channel of member 1.
    """
    there, encode = [], ExactCodec.encode

    def encode_and_withdraw(codec, x, wire):
        encode(codec, x, wire)
        monkeypatch.setattr(ExactCodec, "encode", encode)
        there.append(fabrics[1].channel("model", LIKE))
        until(lambda: lane.withdrawn)
        assert there[0].version(0) == 0

    monkeypatch.setattr(ExactCodec, "encode", encode_and_withdraw)
    return there


def test_a_message_that_is_being_written_when_memory_turns_out_unreadable_is_sent(monkeypatch):
    with members(2) as fabrics:
        monkeypatch.setattr(near(fabrics[1], 0), "map", refuse)
        here = fabrics[0].channel("model", LIKE)
        assert here.send(1, "x", vector(0))
        there = withdraw_while_writing(monkeypatch, fabrics, here._shm.lanes[1])
        assert here.send(1, "x", vector(1))
        assert here.send(1, "x", vector(2))
        for value in range(3):
            assert torch.equal(there[0].wait("x", DEADLINE_SECONDS).x, vector(value))
        assert there[0].receive("x") is None


def test_a_vector_that_is_being_written_when_memory_turns_out_unreadable_is_sent(monkeypatch):
    with members(2) as fabrics:
        monkeypatch.setattr(near(fabrics[1], 0), "map", refuse)
        here = fabrics[0].channel("model", LIKE)
        there = withdraw_while_writing(monkeypatch, fabrics, here._shm.lanes[1])
        assert here.publish(vector(1)) == 1
        assert there[0].wait_newer([0], [0], DEADLINE_SECONDS)
        assert torch.equal(there[0].peek(0)[0], vector(1))


def test_a_collective_in_memory_that_cannot_be_mapped_is_sent_instead(monkeypatch):
    with members(2) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        opened = os.open

        def refuse_files(path, *rest):
            return refuse() if str(path).startswith("/proc/") else opened(path, *rest)

        monkeypatch.setattr(os, "open", refuse_files)
        x, y = vector(1), vector(3)
        assert at_once(lambda: here.mean_(x), lambda: there.mean_(y)) == [2, 2]
        assert torch.equal(x, vector(2))
        refused = [fabric.refused for fabric in fabrics]
        assert {"memory": 1} in refused, "one of the two tried first"
        assert all(causes in ({}, {"memory": 1}) for causes in refused)
        here.send(1, "x", vector(5))
        assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, vector(5))


def test_without_descriptors_vectors_are_sent(monkeypatch):
    with cabled() as (fabrics, cable):
        for fabric in fabrics:
            monkeypatch.setattr(fabric.endpoint.credentials.shm, "allocate", refuse)
        here, there = channels(fabrics, like=LIKE)
        here.send(1, "x", vector(5))
        assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, vector(5))
        here.publish(vector(6))
        assert there.wait_newer([0], [0], DEADLINE_SECONDS)
        assert torch.equal(there.peek(0)[0], vector(6))
        assert torch.equal(here.peek(0)[0], vector(6))
        until(lambda: cable.carried_bytes > 2 * LIKE.nbytes)  # counted once it has been passed on


def test_a_member_takes_half_of_the_descriptors_at_most(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 20))
    with members(2) as fabrics:
        every = [channels(fabrics, name=str(number)) for number in range(8)]
        for here, there in every:
            here.send(1, "x", torch.ones(5))
            assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, torch.ones(5))
        parts = [len(fabric.endpoint.credentials.shm._mapped_ranges) for fabric in fabrics]
        assert all(0 < count <= 10 for count in parts), parts


def test_messages_in_memory_wait_for_those_sent_over_the_connection_before():
    """As happens when a member that was started anew is found to be a neighbour after the first message."""
    with cabled() as (fabrics, cable):
        here, there = channels(fabrics)
        lane = here._shm.lanes.pop(1)
        cable.cut()
        assert here.send(1, "x", torch.zeros(5))
        here._shm.lanes[1] = lane
        assert not here.send(1, "x", torch.ones(5), deadline_seconds=0.1)
        cable.mend()
        assert here.send(1, "x", torch.ones(5))
        assert [float(there.wait("x", DEADLINE_SECONDS).x[0]) for _ in range(2)] == [0.0, 1.0]


def test_descriptors_are_given_back():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with members(2) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        for value in range(30):
            here.publish(vector(value))
            here.send(1, "x", vector(value))
            there.wait("x", DEADLINE_SECONDS)
        assert len(os.listdir("/proc/self/fd")) < before + 30
    del fabrics, here, there
    until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) <= before)


def test_only_the_process_itself_is_taken_for_it():
    me, other = ShmOwner(b"m" * 16), ShmOwner(b"o" * 16)
    assert isinstance(me.open_peer(os.getpid(), other.descriptor, b"o" * 16), ShmPeer)
    assert me.open_peer(os.getpid(), other.descriptor, b"x" * 16) is None
    assert me.open_peer(os.getpid(), me.descriptor, b"o" * 16) is None
    assert me.open_peer(2**22 + 1, other.descriptor, b"o" * 16) is None
    assert me.open_peer(os.getpid(), -1, b"o" * 16) is None


def test_what_is_no_file_of_ours_is_neither_opened_nor_read():
    """A stranger could name any descriptor of any process: a pipe would be emptied, or waited for."""
    me = ShmOwner(b"m" * 16)
    read, write = os.pipe()
    os.write(write, b"o" * 16)
    assert me.open_peer(os.getpid(), read, b"o" * 16) is None
    assert os.read(read, 100) == b"o" * 16
    assert me.open_peer(os.getpid(), read, b"o" * 16) is None  # and nobody waits for more
    os.close(read)
    os.close(write)


def test_another_file_under_the_descriptor_is_not_read():
    me, other = ShmOwner(b"m" * 16), ShmOwner(b"o" * 16)
    lent, else_ = other.new_buffer(1 << 20), other.new_buffer(1 << 20)
    assert isinstance(lent, Region)
    lent[:] = 7
    neighbour = me.open_peer(os.getpid(), other.descriptor, b"o" * 16)
    assert (neighbour.region(lent.address) == 7).all()
    with pytest.raises(OSError, match="another file"):
        neighbour.region(else_.address._replace(descriptor=lent.address.descriptor))
    assert me.open_peer(os.getpid(), other.descriptor, b"o" * 16) is None


@pytest.mark.parametrize("span", [(0, 4096), (4096, 0), (5000, 10), (4096, 1 << 40), (1 << 41, 10)], ids=str)
def test_what_no_memory_has_is_not_mapped(span):
    """A read beyond the end of a file would end the process; the first page is for the incarnation."""
    me, other = ShmOwner(b"m" * 16), ShmOwner(b"o" * 16)
    neighbour = me.open_peer(os.getpid(), other.descriptor, b"o" * 16)
    with pytest.raises(OSError, match="is not page-aligned"):
        neighbour.map(MemoryRange(*span))


def test_memory_that_was_cleared_takes_none():
    me = ShmOwner(b"m" * 16)
    part, span = me.allocate(1 << 20)
    part[:] = 1
    full = os.fstat(me.descriptor).st_blocks
    me.release(span)
    assert os.fstat(me.descriptor).st_blocks * 512 <= full * 512 - (1 << 20)
    assert not part.any()


def test_a_part_of_memory_is_the_same_at_both_ends_and_outlives_its_owner():
    me, other = ShmOwner(b"m" * 16), ShmOwner(b"o" * 16)
    neighbour = me.open_peer(os.getpid(), other.descriptor, b"o" * 16)
    part, span = other.allocate(10_000)
    part[-1] = 7
    del part, other
    gc.collect()
    seen = neighbour.map(span)
    assert seen.nbytes == 10_000
    assert seen[-1] == 7


def test_a_part_of_a_region_has_no_place():
    whole = ShmOwner(b"m" * 16).new_buffer(1 << 20)
    assert whole[:].address == whole.address
    assert whole[:100].address is None
    assert whole[100:].address is None
