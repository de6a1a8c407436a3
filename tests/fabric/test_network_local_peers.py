"""Members of one host: vectors stay in memory, whole, in order and once; where not, they are sent."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from fabric.networked import at_once, cabled, channels, members
from murmurate.fabric.network.compression import ExactCodec
from murmurate.fabric.network.shm_peer import MemoryRange, Region, ShmOwner, ShmPeer
from waiting import DEADLINE_SECONDS, until

N = 200_000  # a vector of 800 kB
LIKE = torch.zeros(N)


def vector(value):
    return torch.full((N,), float(value))


def near(fabric, peer):
    return fabric.endpoint.connections[peer].local_peer


def refuse(*_, **__):
    raise OSError("not yours")


@pytest.mark.parametrize("encrypt", [True, False])
def test_vectors_are_not_sent_over_the_connection(encrypt):
    with cabled(encrypt=encrypt) as (fabrics, cable):
        assert near(fabrics[0], 1)
        assert near(fabrics[1], 0)
        here, there = channels(fabrics, like=LIKE)
        for value in range(8):
            here.send(1, "x", vector(value))
            there.publish(vector(-value))
            assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, vector(value))
            assert here.wait_newer([1], [value], DEADLINE_SECONDS)
            assert torch.equal(here.peek(1)[0], vector(-value))
        x, y = vector(1), vector(3)
        assert at_once(lambda: here.mean_(x), lambda: there.mean_(y)) == [2, 2]
        assert torch.equal(x, vector(2))
        assert cable.carried_bytes < LIKE.nbytes / 10
        assert all(not fabric.refused for fabric in fabrics)


def test_a_member_without_shared_memory_is_sent_everything():
    with cabled(shared_memory=False) as (fabrics, cable):
        assert not near(fabrics[0], 1)
        assert not near(fabrics[1], 0)
        here, there = channels(fabrics, like=LIKE)
        here.send(1, "x", vector(1))
        assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, vector(1))
        until(lambda: cable.carried_bytes > LIKE.nbytes)


@pytest.mark.parametrize("floats", [300_000, 1_000_000])
def test_a_publisher_in_a_hurry_tears_nothing(floats):
    """Buffers are used again, but none that a neighbour may still be reading."""
    with members(3) as fabrics:
        writer, *readers = channels(fabrics, like=torch.zeros(floats))
        over = threading.Event()

        def publish():
            value = 0
            while not over.is_set():
                value += 1
                writer.publish(torch.full((floats,), float(value)))

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            for turn in range(60):
                for reader in readers:
                    assert reader.wait_newer([0], [turn], DEADLINE_SECONDS)
                    x, version = reader.peek(0)
                    assert (x == version).all()
        finally:
            over.set()
            thread.join()


def test_a_publish_costs_one_copy_however_many_read():
    with members(4) as fabrics:
        writer, *readers = channels(fabrics, like=LIKE)
        for value in range(5):
            writer.publish(vector(value))
            for reader in readers:
                assert reader.wait_newer([0], [value], DEADLINE_SECONDS)
                assert torch.equal(reader.peek(0)[0], vector(value))
        assert writer.traffic.bytes == 5 * LIKE.nbytes
        assert [reader.traffic.bytes for reader in readers] == [5 * LIKE.nbytes] * 3


def test_a_peeked_vector_is_read_where_it_lies_and_stays_until_the_next_peek():
    with members(2) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        here.publish(vector(1))
        assert there.wait_newer([0], [0], DEADLINE_SECONDS)
        held = there.peek(0)[0]
        for value in range(2, 20):
            here.publish(vector(value))
        assert torch.equal(held, vector(1))
        own = here.peek(0)[0]
        here.publish(vector(20))
        here.publish(vector(21))
        assert torch.equal(own, vector(19))
        assert torch.equal(there.peek(0)[0], vector(21))


def test_messages_are_kept_for_as_long_as_a_member_holds_them():
    """More than there are slots, so some lie where they were written and the others were copied."""
    with members(2) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        slots = len(here._shm.lanes[1].ring.slots)
        kept = []
        for value in range(2 * slots):
            assert here.send(1, "x", vector(value))
            kept.append(there.wait("x", DEADLINE_SECONDS).x[1:3])
        assert [float(x[0]) for x in kept] == [float(value) for value in range(2 * slots)]


def test_a_queue_in_memory_is_bounded_under_each_tag_and_others_go_on():
    """Beyond 64 tags how many messages were read is no longer counted in memory, but told."""
    with members(2) as fabrics:
        here, there = channels(fabrics)
        tags = [str(number) for number in range(70)]
        for tag in tags:
            assert here.send(1, tag, torch.zeros(5))
            there.wait(tag, DEADLINE_SECONDS)
        capacity = here._mailbox.capacity
        for tag in (tags[0], tags[-1]):
            taken = 0
            while here.send(1, tag, torch.full((5,), float(taken)), deadline_seconds=0.0):
                taken += 1
                assert taken <= capacity
                there.receive("nothing")  # takes all out of the slots
            until(lambda tag=tag: not here.send(1, tag, torch.zeros(5), deadline_seconds=0.0))
            assert here.send(1, "another", torch.zeros(5))
            assert there.wait("another", DEADLINE_SECONDS)
            assert [float(there.wait(tag, DEADLINE_SECONDS).x[0]) for _ in range(taken)] == list(range(taken))
            assert here.send(1, tag, torch.zeros(5))
            assert there.wait(tag, DEADLINE_SECONDS)


def test_threads_that_send_to_one_local_peer_do_not_mix():
    """Each under a tag of its own, with more messages than there are slots."""
    with members(2) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        tags, count = ("a", "b", "c"), 60

        def send(tag):
            return all(here.send(1, tag, vector(number), note=number) for number in range(count))

        def read():
            found = {tag: [] for tag in tags}
            for _ in range(count):
                for tag in tags:
                    message = there.wait(tag, DEADLINE_SECONDS)
                    assert (message.x == message.note).all()
                    found[tag].append(message.note)
            return found

        *sent, found = at_once(*[lambda tag=tag: send(tag) for tag in tags], read)
        assert sent == [True] * 3
        assert all(found[tag] == list(range(count)) for tag in tags)


def test_one_channel_has_local_peers_and_members_elsewhere():
    with members(3, each={2: {"shared_memory": False}}) as fabrics:
        assert near(fabrics[0], 1)
        assert not near(fabrics[0], 2)
        here, beside, away = channels(fabrics, like=LIKE)
        for value in range(12):
            assert here.publish(vector(value)) == value + 1
            for other in (beside, away):
                assert here.send(other.rank, "x", vector(-value))
                assert torch.equal(other.wait("x", DEADLINE_SECONDS).x, vector(-value))
                assert other.wait_newer([0], [value], DEADLINE_SECONDS)
                assert torch.equal(other.peek(0)[0], vector(value))
        assert torch.equal(here.peek(0)[0], vector(11))
        beside.publish(vector(5))
        assert away.wait_newer([1], [0], DEADLINE_SECONDS)
        assert torch.equal(away.peek(1)[0], vector(5))


def test_waiting_leaves_the_processor_to_others(monkeypatch):
    """What is counted are polls and the pauses between them: a slow machine has little time even for a wait
    that is busy."""
    with members(2) as fabrics:
        (here, _) = channels(fabrics, like=LIKE)
        endpoint, polls, pauses = fabrics[0].endpoint, [], []
        wait, pause = endpoint.wait, endpoint.changed.wait

        def counted(condition, *given, **named):
            return wait(lambda: polls.append(None) or condition(), *given, **named)

        def paused(seconds):
            pauses.append(seconds)
            return pause(seconds)

        monkeypatch.setattr(endpoint, "wait", counted)
        monkeypatch.setattr(endpoint.changed, "wait", paused)
        assert here.wait("never", 0.3) is None
        assert not here.wait_newer([1], [0], 0.3)
    assert 2 < len(polls) < len(pauses) + 10  # a wait begins with a poll
    assert sum(seconds < 4e-4 for seconds in pauses) < 40  # short are the first ones, and the last


def test_a_member_that_waits_is_reached_by_what_comes_through_memory():
    with members(2) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        for value in range(20):
            message, *_ = at_once(
                lambda: there.wait("x", DEADLINE_SECONDS), lambda v=value: here.send(1, "x", vector(v))
            )
            assert torch.equal(message.x, vector(value))
            newer, _ = at_once(
                lambda v=value: there.wait_newer([0], [v], DEADLINE_SECONDS),
                lambda v=value: here.publish(vector(v)),
            )
            assert newer
        full = 0
        while here.send(1, "full", vector(full), deadline_seconds=0.0):
            full += 1
        sent, _ = at_once(
            lambda: here.send(1, "full", vector(full)), lambda: there.wait("full", DEADLINE_SECONDS)
        )
        assert sent


# -- where it does not work --------------------------------------------------------------------------


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
