"""What a member of the network fabric does not take from another one, sent to it through real sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fabric.networked import RUN, SECRET, N, at_once, fill
from faults.rogue import CHANNEL, Rogue, logged
from murmurate.fabric.network.crypto import AeadStream
from murmurate.fabric.network.endpoint import digest
from murmurate.fabric.network.fabric import NetworkFabric
from murmurate.fabric.network.frames import META_LIMIT_BYTES, Frame, Kind, Origin, Pipe, SilenceTimeout
from murmurate.fabric.network.handshake import set_timeouts
from murmurate.fabric.network.shm_peer import Region, RegionAddress
from waiting import DEADLINE_SECONDS, until

ENCRYPTED = [True, False]


@pytest.fixture(params=ENCRYPTED, ids=["encrypted", "plain"])
def scene(request):
    """(a member, its channel, a rogue that is connected to it)."""
    store = dist.HashStore()
    fabric, rogue = at_once(
        lambda: NetworkFabric(
            0,
            2,
            store,
            run_id=RUN,
            secret=SECRET,
            encrypt=request.param,
            deadline_seconds=20.0,
            silence_seconds=1.0,
        ),
        lambda: Rogue(store, request.param),
    )
    channel = fabric.channel("model", torch.zeros(N))
    yield fabric, channel, rogue
    rogue.close()
    fabric.close(0.0)


def refuses(scene, caplog, cause, act):
    """``act`` is counted under ``cause`` and logged; then an honest message still arrives."""
    fabric, channel, rogue = scene
    with caplog.at_level(logging.WARNING, "murmurate.fabric.network.fabric"):
        with contextlib.suppress(OSError):  # it may hang up before all has been sent
            act()
        until(lambda: logged(caplog, cause), cause)
    assert fabric.refused == {cause: 1}
    rogue.connect()
    rogue.numbered = fabric.endpoint.connections[1].received
    rogue.send(rogue.message(7))
    message = channel.wait("x", DEADLINE_SECONDS)
    assert message is not None
    assert torch.equal(message.x, fill(7))
    assert channel.receive("x") is None
    assert fabric.refused == {cause: 1}


class TestOfAMember:
    """Wrong messages on a connection whose keys are right."""

    def test_a_message_of_another_run(self, scene, caplog):
        rogue = scene[2]
        other = Origin(digest("another run"), 0)
        refuses(scene, caplog, "run", lambda: rogue.send(rogue.message(1), origin=other))

    def test_a_message_of_an_old_epoch(self, scene, caplog):
        rogue = scene[2]
        old = Origin(rogue.me.run[:8], 7)
        refuses(scene, caplog, "epoch", lambda: rogue.send(rogue.message(1), origin=old))

    def test_a_vector_in_memory_that_was_not_lent(self, scene, caplog):
        """The rogue has shown no memory in the handshake, and claims that a message lies there."""
        rogue = scene[2]
        message = rogue.message(1)
        lies = np.zeros(message.length, dtype=np.uint8).view(Region)
        lies.address = RegionAddress(3, 1, message.length)
        message.payload = lies
        rogue.pipe.peer_reads = True
        refuses(scene, caplog, "meta", lambda: rogue.send(message))

    def test_shared_memory_offered_by_a_peer_that_is_not_local(self, scene, caplog):
        rogue = scene[2]
        state = [["shm", CHANNEL.hex(), [4096, 8192]]]
        refuses(scene, caplog, "memory", lambda: rogue.send(Frame(Kind.CONTROL, meta={"state": state})))

    @pytest.mark.parametrize("place", ["head", "meta", "vector", "last"])
    def test_a_bit_that_was_flipped(self, scene, caplog, place):
        rogue = scene[2]
        data = rogue.recorded(rogue.message(1))
        at = {"head": 20, "meta": 64 + 16 + 3, "vector": len(data) - 20, "last": len(data) - 1}[place]
        data[at] ^= 0x10
        refuses(scene, caplog, "checksum", lambda: rogue.pipe._socket.sendall(data))

    @pytest.mark.parametrize("kept", [1, 70, 90, -1])
    def test_a_message_that_ends_in_its_middle(self, scene, caplog, kept):
        rogue = scene[2]

        def act():
            rogue.pipe._socket.sendall(rogue.recorded(rogue.message(1))[:kept])
            rogue.pipe.close()

        refuses(scene, caplog, "truncated", act)

    @pytest.mark.parametrize("length", [10 * 2**30, 2**63, 4 * N - 4, 4 * N + 4, 0])
    @pytest.mark.parametrize("kind", [Kind.MAIL, Kind.REGISTER])
    def test_a_length_that_is_not_the_channels(self, scene, caplog, length, kind):
        rogue, before = scene[2], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        message = rogue.message(1)
        message.kind = kind
        refuses(scene, caplog, "length", lambda: rogue.send(message, length=length))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB

    def test_ten_gigabytes_for_a_channel_that_no_member_has_made(self, scene, caplog):
        rogue, before = scene[2], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        scene[0].endpoint.deadline_seconds = 0.5  # how long the message waits for its channel
        message = rogue.message(1)
        message.channel = digest("unmade")
        refuses(scene, caplog, "length", lambda: rogue.send(message, length=10 * 2**30))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000

    def test_early_messages_that_are_not_kept_take_no_room_from_others(self, scene, caplog):
        """Cut off in their middle, or of a vector, of which there will be another."""
        fabric, _, rogue = scene
        vector, message = rogue.message(1), rogue.message(1)
        vector.kind, vector.channel, message.channel = Kind.REGISTER, digest("unmade"), digest("unmade")

        def act():
            rogue.send(vector)
            rogue.pipe._socket.sendall(rogue.recorded(message)[:90])
            rogue.pipe.close()

        refuses(scene, caplog, "truncated", act)
        assert fabric.endpoint.pending.bytes == 0
        rogue.numbered = fabric.endpoint.connections[1].received
        kept = rogue.message(2)
        kept.channel = digest("unmade")
        rogue.send(kept)
        until(lambda: fabric.endpoint.pending.bytes == kept.length)

    def test_json_that_is_too_long(self, scene, caplog):
        rogue = scene[2]
        message = rogue.message(1)
        message.meta = {"tag": "x" * META_LIMIT_BYTES}
        refuses(scene, caplog, "length", lambda: rogue.send(message))

    @pytest.mark.parametrize("meta", [{}, {"tag": 5}, {"tag": ["x"]}], ids=str)
    def test_a_message_without_a_tag(self, scene, caplog, meta):
        rogue = scene[2]
        message = rogue.message(1)
        message.meta = meta
        refuses(scene, caplog, "meta", lambda: rogue.send(message))

    @pytest.mark.parametrize(
        "state",
        [
            5,
            [[]],
            [[1]],
            [["want", CHANNEL.hex(), "much"]],
            [["want", "xyz", 1]],
            [["taken", CHANNEL.hex(), 3]],
            [["shm", CHANNEL.hex(), 3]],
            [["shm", CHANNEL.hex(), [4096]]],
        ],
        ids=str,
    )
    def test_state_that_makes_no_sense(self, scene, caplog, state):
        rogue = scene[2]
        refuses(scene, caplog, "meta", lambda: rogue.send(Frame(Kind.CONTROL, meta={"state": state})))

    @pytest.mark.parametrize(
        "meta",
        [
            {},
            {"act": "dance"},
            {"act": "result", "members": "all"},
            {"act": "result", "members": [0, 9]},
            {"act": "result", "members": [0, 1], "published": [1]},
        ],
        ids=str,
    )
    def test_a_round_that_makes_no_sense(self, scene, caplog, meta):
        rogue = scene[2]
        frame = rogue.message(1)
        frame.kind, frame.meta = Kind.ROUND, meta
        refuses(scene, caplog, "meta", lambda: rogue.send(frame))

    @pytest.mark.parametrize(("number", "cause"), [(5, "number"), (0, "duplicate")])
    def test_a_number_out_of_turn(self, scene, caplog, number, cause):
        rogue = scene[2]
        message = rogue.message(1)
        message.number = number
        refuses(scene, caplog, cause, lambda: rogue.send(message))

    def test_more_messages_than_the_queue_holds(self, scene):
        fabric, channel, rogue = scene
        with contextlib.suppress(OSError):
            for number in range(1000):
                rogue.send(rogue.message(number))
        until(lambda: fabric.refused.get("queue"))
        waiting = 0
        while channel.receive("x") is not None:
            waiting += 1
        assert waiting == 64


def test_a_message_that_lost_some_bytes_is_not_filled_up_with_heartbeats():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    keys = os.urandom(32), os.urandom(32)
    pipe, peer = (
        Pipe(sock, Origin(b"r" * 8, 0), *(AeadStream(key) for key in order))
        for sock, order in ((ours, keys), (theirs, keys[::-1]))
    )
    set_timeouts(theirs, 1.0)
    ended = threading.Event()

    def send():
        frame = Frame(Kind.MAIL, CHANNEL, meta={"tag": "x"}, payload=bytes(200_000))
        parts = [bytes(part) for piece in pipe._pieces(frame, None) for part in piece]
        ours.sendall(b"".join(parts)[:-50_000])
        while not ended.wait(0.1):
            pipe.writer(Frame(Kind.CONTROL)).write()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(SilenceTimeout):
            peer.receive(lambda frame, length: bytearray(length))
    finally:
        ended.set()
        thread.join()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("encrypt", ENCRYPTED)
def test_only_an_encrypted_connection_hides_the_payload(encrypt):
    ours, theirs = socket.socketpair()
    origin = Origin(b"r" * 8, 0)
    key = os.urandom(32)
    pipe = Pipe(ours, origin, AeadStream(key, encrypt), AeadStream(key, encrypt))
    words = b"attack at dawn! " * 4
    pipe.writer(Frame(Kind.MAIL, CHANNEL, meta={"tag": "x"}, payload=words)).write()
    ours.close()
    seen = bytearray()
    while chunk := theirs.recv(1 << 16):
        seen += chunk
    assert (words in seen) is not encrypt
