"""Shared memory of local peers when connections are cut, and when members die or start anew: nothing is torn,
lost or repeated, and nobody is held up by the dead."""

from __future__ import annotations

import functools
import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist

from fabric.networked import RUN, SECRET, cabled, channels, members
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network.compression import Bfloat16Codec, ExactCodec
from murmurate.fabric.network.fabric import Died, NetworkFabric, run_members
from waiting import DEADLINE_SECONDS, until

N = 50_000
LIKE = torch.zeros(N)


def vector(value):
    return torch.full((N,), float(value))


# -- connections ------------------------------------------------------------------------------------------


def test_what_is_in_memory_is_read_though_the_link_is_cut():
    with cabled() as (fabrics, cable):
        here, there = channels(fabrics)
        here.publish(torch.ones(5))
        assert there.wait_newer([0], [0], DEADLINE_SECONDS)
        cable.cut()
        until(lambda: list(fabrics[0].living()) == [0])
        until(lambda: list(fabrics[1].living()) == [1])
        assert here.publish(torch.full((5,), 2.0)) == 2
        assert there.version(0) == 2
        assert torch.equal(there.peek(0)[0], torch.full((5,), 2.0))
        for number in range(20):
            assert here.send(1, "x", torch.full((5,), float(number)))
        messages = [there.receive("x") for _ in range(10)]
        cable.mend()
        until(lambda: list(fabrics[0].living()) == list(fabrics[1].living()) == [0, 1])
        messages += [there.receive("x") for _ in range(10)]
        assert [float(message.x[0]) for message in messages] == list(range(20))
        assert there.receive("x") is None


# -- members that start anew, in this process ------------------------------------------------------------


def test_incarnations_that_end_while_they_read_delay_no_member():
    """Each holds a peeked vector and messages when it ends; nothing of that counts in the next."""
    store = dist.HashStore()
    options = {"deadline_seconds": 10.0, "silence_seconds": 1.0}
    held = []
    with members(2, {0: store, 1: store}, **options) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        for life in range(4):
            for number in range(8):
                here.publish(vector(number))
                assert here.send(1, "x", vector(number), deadline_seconds=5.0)
                assert there.wait_newer([0], [here.version(0) - 1], DEADLINE_SECONDS)
                x, version = there.peek(0)
                assert (version, float(x[0])) == (8 * life + number + 1, number)
                held.append(there.wait("x", DEADLINE_SECONDS).x)
                assert float(held[-1][0]) == number
            held.append(x)
            assert here.send(1, "x", vector(-1)), "which nobody reads"
            fabrics[1].endpoint._close_connections()  # as if its process had ended
            until(lambda: list(fabrics[0].living()) == [0])
            fabrics[1] = NetworkFabric(1, 2, store, run_id=RUN, secret=SECRET, **options)
            (there,) = channels(fabrics[1:], like=LIKE)
            until(lambda: list(fabrics[0].living()) == [0, 1])
            assert there.wait_newer([0], [8 * life + 7], DEADLINE_SECONDS)
            assert there.version(0) == 8 * (life + 1)
            held.clear()  # the former life's messages are given back to the former life's slots
            gc.collect()
        shm = here._shm
        until(lambda: len(shm.lanes) == len(shm.mapped) == 1, "each shows the other its memory")
        lender = fabrics[0].endpoint.credentials.shm
        assert os.fstat(lender.descriptor).st_blocks * 512 < 8 * LIKE.nbytes, (
            "memory of former lives is given back"
        )
        assert len(lender._mapped_ranges) < 12, "memory of former lives is mapped no more"


@pytest.mark.parametrize("reads", [1, 2, 3])
@pytest.mark.parametrize("act", ["version", "peek"])
def test_a_restart_while_a_thread_reads_without_the_lock_changes_no_version(act, reads):
    """The publisher restarts when the thread has looked up its memory so many times."""
    with members(2) as fabrics:
        here, there = channels(fabrics)
        for number in range(4):
            here.publish(torch.full((5,), float(number)))
        register = there._register
        subscription = register._subscriptions[0]
        until(lambda: subscription.mapped is not None)
        left = reads

        class Restarting(type(subscription)):
            def __getattribute__(self, name):
                nonlocal left
                value = super().__getattribute__(name)
                left -= name == "mapped"
                if not left:
                    left = -1
                    with fabrics[1].endpoint.lock:
                        register.peer_restarted(0)
                return value

        subscription.__class__ = Restarting
        assert (there.version(0) if act == "version" else there.peek(0)[1]) == 4
        assert there.version(0) == 4
        assert left < 0, "it has restarted"


@pytest.mark.parametrize(
    ("codec", "compression", "shared_memory"),
    [(ExactCodec, "none", True), (Bfloat16Codec, "bfloat16", False)],
    ids=["in memory", "over the connection"],
)
def test_a_message_under_way_to_a_former_incarnation_does_not_reach_the_next(
    codec, compression, shared_memory, monkeypatch
):
    store = dist.HashStore()
    options = {"deadline_seconds": 10.0, "silence_seconds": 1.0}
    options |= {"compression": compression, "shared_memory": shared_memory}
    with members(2, {0: store, 1: store}, **options) as fabrics:
        here, _ = channels(fabrics)
        encode = codec.encode

        def and_then_it_starts_anew(own_codec, x, wire):
            encode(own_codec, x, wire)
            monkeypatch.undo()
            fabrics[1].endpoint._close_connections()
            fabrics[1] = NetworkFabric(1, 2, store, run_id=RUN, secret=SECRET, **options)
            until(lambda: fabrics[0].endpoint.connections[1].connected)

        monkeypatch.setattr(codec, "encode", and_then_it_starts_anew)
        here.send(1, "x", torch.ones(5))
        (there,) = channels(fabrics[1:])
        assert here.send(1, "x", torch.full((5,), 2.0))
        assert float(there.wait("x", DEADLINE_SECONDS).x[0]) == 2.0
        assert there.receive("x") is None


# -- processes that are killed --------------------------------------------------------------------------


def kill_myself(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def send_and_die(moment, fabric):
    """Publish and send number after number; be killed over number 20, in the midst of a copy or before the
    counter is raised."""
    channel = fabric.channel("model", LIKE)
    channel.mean_(torch.zeros(N))
    for number in range(20):
        channel.publish(vector(number))
        assert channel.send(1, "x", vector(number))
    encode = ExactCodec.encode

    def half(codec, x, wire):
        wire[: wire.nbytes // 2] = 255
        kill_myself()

    def whole(codec, x, wire):
        encode(codec, x, wire)
        kill_myself()

    ExactCodec.encode = half if moment.startswith("half") else whole
    if moment.endswith("message"):
        channel.send(1, "x", vector(20))
    else:
        channel.publish(vector(20))


def read_until_it_is_dead(late, fabric):
    """Numbers of whole messages, and of the newest vector. late: begins when the other is dead."""
    channel = None if late else fabric.channel("model", LIKE)
    if channel is not None:
        channel.mean_(torch.zeros(N))
        while not channel.has_lost(0):
            channel.wait("nothing", 0.005)
    else:
        until(lambda: any(key[0] == "shm" for _, key in fabric.endpoint.pending.announcements))
        fabric.channel("word", torch.zeros(1)).send(0, "told", torch.zeros(1))
        until(lambda: 0 not in fabric.living())
        channel = fabric.channel("model", LIKE)
    numbers = []
    while (message := channel.receive("x")) is not None:
        numbers.append([float(v) for v in message.x.unique()])
    x, version = channel.peek(0)
    return numbers, [float(v) for v in x.unique()], version, channel.send(0, "x", LIKE)


def named_shared_memory():
    """Without that of Doom, whose tests may run at the same time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("ViZDoom")}


@pytest.mark.parametrize("moment", ["half a message", "message", "half a vector", "vector"])
def test_messages_before_a_kill_are_complete_and_later_ones_are_absent(moment):
    before = named_shared_memory()
    sender = functools.partial(send_and_die, moment)
    died, found = run_members(2, [sender, functools.partial(read_until_it_is_dead, False)])
    assert died == Died(0, -signal.SIGKILL)
    assert found == ([[float(number)] for number in range(20)], [19.0], 20, False)
    assert named_shared_memory() <= before


def send_for_later_and_die(fabric):
    channel = fabric.channel("model", LIKE)
    for number in range(20):
        channel.publish(vector(number))
        assert channel.send(1, "x", vector(number))
    assert fabric.channel("word", torch.zeros(1)).wait("told", DEADLINE_SECONDS)
    kill_myself()


def test_the_memory_of_a_dead_member_is_mapped_when_the_channel_is_made_later():
    died, found = run_members(2, [send_for_later_and_die, functools.partial(read_until_it_is_dead, True)])
    assert died == Died(0, -signal.SIGKILL)
    assert found == ([[float(number)] for number in range(20)], [19.0], 20, False)


def publish_to_all(fabric):
    """500 versions and 200 messages, while readers die."""
    channel = fabric.channel("model", LIKE)
    for number in range(500):
        channel.publish(vector(number))
        if number < 200:
            assert channel.send(1, "x", vector(number))
        channel.send(2, "x", vector(number), deadline_seconds=0.0)
    return "all"


def read_to_the_end(fabric):
    channel = fabric.channel("model", LIKE)
    seen = messages = 0
    while seen < 500 or messages < 200:
        if channel.version(0) > seen:
            x, seen = channel.peek(0)
            assert (x == seen - 1).all(), "torn"
        message = channel.receive("x")
        if message is not None:
            assert (message.x == messages).all(), "torn, lost or repeated"
            messages += 1
    return seen, messages


def read_and_die(fabric):
    """Killed while it has a vector pinned and messages lent."""
    channel = fabric.channel("model", LIKE)
    assert channel.wait_newer([0], [2], DEADLINE_SECONDS)
    held = [channel.peek(0), channel.wait("x", DEADLINE_SECONDS), channel.wait("x", DEADLINE_SECONDS)]
    assert all(held)
    kill_myself()


def test_a_reader_that_is_killed_while_it_reads_delays_no_member():
    done, read, died = run_members(3, [publish_to_all, read_to_the_end, read_and_die])
    assert done == "all"
    assert read == (500, 200)
    assert died == Died(2, -signal.SIGKILL)


def test_a_peek_before_anything_was_published_names_the_local_peer():
    with members(2) as fabrics:
        here, _ = channels(fabrics)
        assert here.version(1) == 0
        with pytest.raises(FabricError, match="rank 1 has published nothing"):
            here.peek(1)
