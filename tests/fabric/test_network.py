"""The network fabric in peace: every store and cipher, traffic that follows reading, buffers, the end."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fabric.networked import N, at_once, channels, fill, members
from murmurate.buffers import Pool, as_tensor
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network import pending
from murmurate.fabric.network.endpoint import digest
from murmurate.fabric.network.fabric import NetworkFabric
from murmurate.fabric.network.frames import Closed
from murmurate.fabric.network.handshake import dial
from murmurate.fabric.network.register import UNREAD_LIMIT
from murmurate.fabric.processes.run_state import RunState
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


def test_members_wait_for_one_that_is_late_with_its_channel(monkeypatch):
    monkeypatch.setattr(pending, "_MAX_BYTES", 100)
    with members(2, shared_memory=False) as fabrics:
        here = fabrics[0].channel("model", torch.zeros(N))
        sent = [fill(value) for value in range(20)]
        assert all(here.send(1, "x", x) for x in sent)
        late = fabrics[1].endpoint.pending
        until(lambda: not late.has_room(4 * N))
        there = fabrics[1].channel("model", torch.zeros(N))
        for x in sent:
            message = there.wait("x", DEADLINE_SECONDS)
            assert message is not None
            assert torch.equal(message.x, x)
        assert not fabrics[1].refused
        assert fabrics[0].endpoint.connections[1].times_connected == 1


def test_a_name_can_be_used_once():
    with members(2) as fabrics:
        fabrics[0].channel("model", torch.zeros(N))
        with pytest.raises(FabricError, match="exists already"):
            fabrics[0].channel("model", torch.zeros(N))


def test_what_was_sent_before_the_close_still_arrives_and_nothing_is_left_behind():
    before = set(threading.enumerate())
    with members(2) as fabrics:
        here, there = channels(fabrics)
        for number in range(30):
            assert here.send(1, "x", fill(number))
        here.publish(fill(7))
        closing = threading.Thread(target=fabrics[0].close)
        closing.start()
        until(lambda: fabrics[1].endpoint.connections[0].finished)
        assert [float(there.wait("x", DEADLINE_SECONDS).x[0]) for _ in range(30)] == [
            float(n) for n in range(30)
        ]
        assert there.version(0) == 1, "who closes answers until the others close too"
        assert there.mean_(fill(2)) == 1, "who has finished is not waited for"
        assert not there.send(0, "x", fill(0))
        fabrics[1].close()
        closing.join(20)
        assert not closing.is_alive()
    until(lambda: not [t for t in set(threading.enumerate()) - before if t.is_alive()])


def test_a_member_that_has_just_restarted_is_not_lost():
    """The connection to its former incarnation was once lost, long ago."""
    with members(2) as fabrics:
        here, _ = channels(fabrics)
        connection = fabrics[0].endpoint.connections[1]
        with fabrics[0].endpoint.lock:
            connection._lost_at -= 3600.0
            assert not here.has_lost(1)
            connection.replace(dataclasses.replace(connection.record, incarnation=bytes(16)))
            assert not here.has_lost(1)


def test_no_newer_version_is_awaited_of_a_member_that_has_made_its_last_step():
    """It stays connected until all have ended."""
    run_state = RunState(2)
    run_state.open()
    with members(2, run_state=run_state) as fabrics:
        here, there = channels(fabrics)
        there.publish(fill(1))
        assert here.wait_newer([1], [0], DEADLINE_SECONDS)
        assert not here.wait_newer([1], [1], 0.0)
        run_state.mark_finished(1)
        assert here.wait_newer([1], [1], 0.0)
        assert fabrics[0].endpoint.connections[1].connected


def test_a_connection_that_comes_about_after_the_close_is_not_kept():
    with members(2) as fabrics:
        endpoint = fabrics[1].endpoint
        connection = endpoint.connections[0]
        handshake = dial(endpoint.credentials, connection.record, connection.received, 5.0)
        endpoint._close_connections()
        with pytest.raises(Closed):
            connection.adopt(handshake)
        assert not connection.connected


@pytest.mark.parametrize("working", [True, False])
def test_a_member_that_works_is_waited_for_beyond_the_deadline(working, monkeypatch):
    run_state = RunState(2)
    run_state.open()
    with members(2, run_state=run_state) as fabrics, ThreadPoolExecutor(1) as pool:
        here, there = channels(fabrics)
        y, late, passed = fill(3), [], 0
        wait = fabrics[0].endpoint.wait

        def next_deadline(condition, deadline_seconds):
            nonlocal passed
            if passed == 3:
                late.append(pool.submit(there.mean_, y))
                monkeypatch.undo()
                return wait(condition, DEADLINE_SECONDS)
            run_state.heartbeat(1, working)
            passed += 1
            return condition()

        monkeypatch.setattr(fabrics[0].endpoint, "wait", next_deadline)
        x = fill(1)
        if working:
            assert (here.mean_(x), late[0].result(DEADLINE_SECONDS)) == (2, 2)
            assert torch.equal(x, fill(2))
            assert torch.equal(y, fill(2))
        else:
            with pytest.raises(FabricError, match=r"rank\(s\) \[1\] did not join round 1.*larger deadline_s"):
                here.mean_(x)
            assert passed == 2  # the deadline, and the time that the leader's message may take


@pytest.mark.parametrize("numbers", [N, 1 << 17], ids=["by the leader", "by an engine"])
def test_time_for_which_a_waiting_member_was_stopped_does_not_count(numbers, monkeypatch):
    """Ctrl-Z stops all members at once: the late ones had no time either."""
    with members(2) as fabrics, ThreadPoolExecutor(1) as pool:
        like = torch.zeros(numbers)
        here, there = channels(fabrics, like=like)
        x, y, late, stopped = like + 1, like + 3, [], 0.0
        wait = fabrics[0].endpoint.changed.wait

        def stop_once(seconds):
            nonlocal stopped
            if threading.current_thread() is not threading.main_thread():
                return wait(seconds)
            if not late and stopped:
                late.append(pool.submit(there.mean_, y))
            stopped = 3600.0
            return wait(seconds)

        clock = time.monotonic
        for module in ("endpoint", "collectives"):
            monkeypatch.setattr(
                f"murmurate.fabric.network.{module}.time",
                SimpleNamespace(monotonic=lambda: clock() + stopped, sleep=time.sleep),
            )
        monkeypatch.setattr(fabrics[0].endpoint.changed, "wait", stop_once)
        assert (here.mean_(x), late[0].result(DEADLINE_SECONDS)) == (2, 2)
        assert torch.equal(x, like + 2)
        assert torch.equal(y, like + 2)


def test_a_member_that_goes_on_with_other_rounds_is_not_waited_for():
    """It works, but has left this one out: packets between them are lost, for example."""
    run_state = RunState(2)
    run_state.open()
    with members(2, run_state=run_state, deadline_seconds=0.2) as fabrics:
        here, _ = channels(fabrics)
        updates = itertools.count(1)

        def alone(condition):
            run_state.advance(1, env_steps=0, clock=next(updates))
            return condition()

        wait = fabrics[0].endpoint.wait
        fabrics[0].endpoint.wait = lambda condition, *rest: wait(lambda: alone(condition), *rest)
        with pytest.raises(FabricError, match=r"rank\(s\) \[1\] did not join round 1.*larger deadline_s"):
            here.mean_(fill(1))
        fabrics[0].endpoint.wait = wait
