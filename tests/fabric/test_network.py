"""The network fabric in peace: every store and cipher, traffic that follows reading, buffers."""

from __future__ import annotations

import signal
import socket

import pytest
import torch
import torch.distributed as dist

from fabric.networked import N, at_once, channels, fill, members
from murmurate.buffers import Pool, as_tensor
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network.endpoint import digest
from murmurate.fabric.network.fabric import NetworkFabric
from murmurate.fabric.network.register import UNREAD_LIMIT
from waiting import DEADLINE_SECONDS, until


def exercise(fabrics):
    """One of everything between two members."""
    here, there = channels(fabrics)
    here.publish(fill(1))
    assert there.wait_newer([0], [0], DEADLINE_SECONDS)
    assert torch.equal(there.peek(0)[0], fill(1))
    assert here.send(1, "x", fill(2), note=2.0**53)
    message = there.wait("x", DEADLINE_SECONDS)
    assert (message.sender, message.note) == (0, 2.0**53)
    assert torch.equal(message.x, fill(2))
    x, y = fill(3), fill(4)
    assert at_once(lambda: here.mean_(x), lambda: there.mean_(y)) == [2, 2]
    assert torch.equal(x, y)
    assert torch.equal(x, fill(3.5))


@pytest.mark.parametrize("kind", ["tcp", "prefix", "file"])
def test_any_store_will_do(kind, tmp_path):
    if kind == "tcp":
        first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = {0: first, 1: dist.TCPStore("127.0.0.1", first.port, is_master=False)}
    else:
        stores = {rank: dist.FileStore(str(tmp_path / "store"), 2) for rank in range(2)}
    if kind == "prefix":
        stores = {rank: dist.PrefixStore("a", dist.PrefixStore("b", store)) for rank, store in stores.items()}
    with members(2, stores) as fabrics:
        exercise(fabrics)


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "options",
    [
        {"encrypt": False},
        {"cipher": "chacha20-poly1305"},
        {"secret": None},
        pytest.param({"address": "::1"}, marks=pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6")),
        {"epoch": 9},
    ],
    ids=str,
)
def test_any_setting_will_do(options):
    with members(2, **options) as fabrics:
        exercise(fabrics)
        assert all(not fabric.refused for fabric in fabrics)


@pytest.mark.parametrize(
    ("options", "words"), [({"cipher": "rot13"}, "aes-256-gcm"), ({"compression": "zip"}, "bfloat16")]
)
def test_an_unknown_setting_is_an_error_with_the_known_ones(options, words):
    with pytest.raises(ValueError, match=words):
        NetworkFabric(0, 1, dist.HashStore(), run_id="r", **options)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_is_an_error(rank, size):
    with pytest.raises(ValueError, match="There is no rank"):
        NetworkFabric(rank, size, dist.HashStore(), run_id="r")


def test_large_vectors_arrive_whole_at_any_place_in_their_pieces():
    count = (1 << 19) + 3  # more than two pieces, and a little
    like = torch.arange(count, dtype=torch.float32)
    with members(2) as fabrics:
        here, there = channels(fabrics, like=like)
        here.publish(like)
        assert here.send(1, "x", like.flip(0))
        assert there.wait_newer([0], [0], DEADLINE_SECONDS)
        assert torch.equal(there.peek(0)[0], like)
        assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, like.flip(0))


def test_vectors_of_any_stride_are_sent():
    with members(2, shared_memory=False) as fabrics:
        here, there = channels(fabrics)
        every_second, repeated = torch.arange(2.0 * N)[::2], torch.tensor(3.0, requires_grad=True).expand(N)
        here.publish(every_second)
        assert there.wait_newer([0], [0], DEADLINE_SECONDS)
        assert torch.equal(there.peek(0)[0], every_second)
        for x in (every_second, repeated, every_second[:2], repeated[:1]):
            assert here.send(1, "x", x)
            assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, x)


def test_a_publisher_sends_nothing_to_a_member_that_never_reads():
    with members(2, shared_memory=False) as fabrics:
        here, there = channels(fabrics)
        for number in range(50):
            here.publish(fill(number))
        at_once(lambda: here.mean_(fill(0)), lambda: there.mean_(fill(0)))
        mean = 2 * 4 * N  # one part each way and its result
        assert here.traffic.bytes <= mean
        assert there.traffic.bytes <= mean


def test_an_interrupted_publish_blocks_no_connection(monkeypatch):
    with members(2, shared_memory=False) as fabrics:
        here, there = channels(fabrics)
        here.publish(fill(1))
        assert torch.equal(there.peek(0)[0], fill(1))  # and requests the next version
        connection = fabrics[0].endpoint.connections[1]
        until(lambda: here._register._requests and not connection.queue.is_pending, "the request")
        note_sent = here._register._note_sent

        def interrupted(peer, copy):
            note_sent(peer, copy)
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(here._register, "_note_sent", interrupted)
            with pytest.raises(KeyboardInterrupt):
                here.publish(fill(2))
        assert there.wait_newer([0], [1], DEADLINE_SECONDS)
        assert torch.equal(there.peek(0)[0], fill(2))
        assert there.send(0, "x", fill(3))
        assert torch.equal(here.wait("x", DEADLINE_SECONDS).x, fill(3))
        assert here.send(1, "x", fill(4))
        assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, fill(4))


def test_an_interrupted_send_blocks_no_connection(monkeypatch):
    with members(2, shared_memory=False) as fabrics:
        here, there = channels(fabrics)
        connection = fabrics[0].endpoint.connections[1]
        post = connection.post

        def interrupted(frame):
            post(frame)
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(connection, "claim", lambda frame: None)  # as if the connection were busy
            patch.setattr(connection, "post", interrupted)
            with pytest.raises(KeyboardInterrupt):
                here.send(1, "x", fill(1))
        assert here.send(1, "x", fill(2))
        assert [float(there.wait("x", DEADLINE_SECONDS).x[0]) for _ in range(2)] == [1.0, 2.0]


def test_a_publisher_stops_for_a_member_that_stops_reading_and_goes_on_when_it_reads_again():
    with members(2, shared_memory=False) as fabrics:
        here, there = channels(fabrics)
        here.publish(fill(0))
        assert there.wait_newer([0], [0], DEADLINE_SECONDS)
        held = there._register._subscriptions[0]
        for number in range(1, 100):
            here.publish(fill(number))
            until(lambda number=number: held.version == number + 1 or not held.requested)
        assert held.version <= 1 + UNREAD_LIMIT
        assert here.traffic.bytes <= (1 + UNREAD_LIMIT) * 4 * N
        assert there.version(0) == 100, "one question, and the newest is there"
        assert torch.equal(there.peek(0)[0], fill(99))


def test_peeked_vectors_and_messages_stay_while_they_are_held():
    """Buffers are used again, but never one that somebody holds, or a view of."""
    with members(2, shared_memory=False) as fabrics:
        here, there = channels(fabrics)
        kept = []
        for number in range(1, 40):
            here.publish(fill(number))
            assert there.wait_newer([0], [number - 1], DEADLINE_SECONDS)
            assert here.send(1, "x", fill(-number))
            kept.append((number, there.peek(0)[0][1:3], there.wait("x", DEADLINE_SECONDS).x.view(N, 1)))
        for number, peeked, message in kept:
            assert torch.equal(peeked, fill(number)[1:3])
            assert torch.equal(message, fill(-number).view(N, 1))


def test_a_buffer_comes_back_when_the_last_view_is_gone():
    pool = Pool(keep=1)
    x = as_tensor(pool.take(40), torch.float32)
    place, view = x.data_ptr(), x[3:5]
    del x
    assert as_tensor(pool.take(40), torch.float32).data_ptr() != place
    del view
    assert as_tensor(pool.take(40), torch.float32).data_ptr() == place


@pytest.mark.parametrize("shared_memory", [True, False])
def test_messages_for_a_channel_that_is_made_later_wait_for_it(shared_memory):
    with members(2, shared_memory=shared_memory) as fabrics:
        here = fabrics[0].channel("late", torch.zeros(N))
        assert here.send(1, "x", fill(1))
        here.publish(fill(2))
        endpoint = fabrics[1].endpoint
        until(
            lambda: (
                endpoint.pending.frames or any(key[0] == "shm" for _, key in endpoint.pending.announcements)
            )
        )
        there = fabrics[1].channel("late", torch.zeros(N))
        assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, fill(1))
        until(lambda: there.version(0) == 1)


def test_members_with_different_models_get_an_error():
    with members(2) as fabrics:
        here = fabrics[0].channel("model", torch.zeros(N))
        there = fabrics[1].channel("model", torch.zeros(N + 1))

        def complaint(fabric, count):
            with pytest.raises(FabricError, match="give all members the same model"):
                fabric.mean_(torch.zeros(count))

        at_once(lambda: complaint(here, N), lambda: complaint(there, N + 1))


def test_early_frames_that_do_not_fit_are_refused_and_all_members_get_an_error():
    """Nothing of it is raised where the channel is made: that thread is the user's."""
    with members(2, shared_memory=False) as fabrics:
        here = fabrics[0].channel("model", torch.zeros(N))
        assert here.send(1, "x", fill(1))
        early = fabrics[1].endpoint.pending
        until(lambda: early.frames and early.announcements)
        with fabrics[1].endpoint.lock:
            early.keep_announcement(0, ("taken", digest("model").hex(), "x"), "much")
        there = fabrics[1].channel("model", torch.zeros(2 * N))
        assert fabrics[1].refused == {"length": 1, "meta": 1}
        assert early.bytes == 0
        with pytest.raises(FabricError, match="give all members the same model"):
            there.send(0, "x", torch.zeros(2 * N))


def test_a_name_can_be_used_once():
    with members(2) as fabrics:
        fabrics[0].channel("model", torch.zeros(N))
        with pytest.raises(FabricError, match="exists already"):
            fabrics[0].channel("model", torch.zeros(N))
