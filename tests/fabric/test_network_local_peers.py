"""Members of one host: vectors stay in memory, whole, in order and once."""

from __future__ import annotations

import threading

import pytest
import torch

from fabric.local_peers import LIKE, near, vector
from fabric.networked import at_once, cabled, channels, members
from waiting import DEADLINE_SECONDS, until


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
