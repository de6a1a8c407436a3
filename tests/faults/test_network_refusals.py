"""What a member of the network fabric does not take, sent to it through real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import random
import resource
import socket
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fabric.networked import (
    RUN,
    SECRET,
    Cable,
    Detour,
    N,
    at_once,
    board,
    cabled,
    channels,
    fill,
    members,
)
from murmurate.errors import MissingExtra
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network import listener
from murmurate.fabric.network.crypto import AeadStream, Identity, PeerRecord
from murmurate.fabric.network.endpoint import digest
from murmurate.fabric.network.fabric import NetworkFabric
from murmurate.fabric.network.frames import (
    META_LIMIT_BYTES,
    Closed,
    Frame,
    FrameRejected,
    Kind,
    Origin,
    Pipe,
    SilenceTimeout,
)
from murmurate.fabric.network.handshake import Credentials, Hello, dial, set_timeouts
from murmurate.fabric.network.shm_peer import Region, RegionAddress
from waiting import DEADLINE_SECONDS, until

CHANNEL = digest("model")
ENCRYPTED = [True, False]


def credentials(rank, identity=None, run=RUN, epoch=0, secret=SECRET, encrypt=True):
    named = digest(run, size_bytes=16)
    return Credentials(rank, named, epoch, secret, identity or Identity(), encrypt, "aes-256-gcm", 1.0)


@dataclasses.dataclass
class Claim(Frame):
    """A frame that claims another length than its payload has."""

    claimed: int = 0

    @property
    def length(self):
        return self.claimed


class Rogue:
    """Rank 1, with all keys of the run and bad manners. It dials, as the higher rank does."""

    def __init__(self, store, encrypt):
        self.me = credentials(1, encrypt=encrypt)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        card = PeerRecord(1, "127.0.0.1", port, self.me.identity.public, self.me.identity.incarnation)
        board(store).set("1", card.pack())
        until(lambda: board(store).check("0"))
        self.victim = PeerRecord.read(board(store).get("0"))
        self.numbered = 0
        self.connect()

    def connect(self):
        def dialled():
            with contextlib.suppress(Closed, OSError, FrameRejected):
                self.pipe = dial(self.me, self.victim, 0, 2.0).pipe
                return True
            return False

        until(dialled)
        threading.Thread(target=self._swallow, args=(self.pipe,), daemon=True).start()

    def _swallow(self, pipe):
        """Read what comes, as otherwise the other side would fill its buffers."""
        with contextlib.suppress(Closed, OSError, FrameRejected, ValueError):
            while True:
                pipe.receive(lambda frame, length: bytearray(length))

    def message(self, value):
        self.numbered += 1
        x = memoryview(fill(value).numpy()).cast("B")
        return Frame(Kind.MAIL, CHANNEL, number=self.numbered, meta={"tag": "x"}, payload=x)

    def recorded(self, frame):
        """The bytes that would be sent for ``frame``, pieces as they are on the line."""
        ours, theirs = socket.socketpair()
        Pipe(ours, self.me.origin, self.pipe._sealer, self.pipe._opener).writer(frame).write()
        ours.close()
        data = bytearray()
        while chunk := theirs.recv(1 << 16):
            data += chunk
        theirs.close()
        return data

    def send(self, frame, origin=None, length=None):
        """origin, length: false ones for the header."""
        pipe = self.pipe
        if origin is not None:
            pipe = Pipe(pipe._socket, origin, pipe._sealer, pipe._opener)
        pipe.writer(frame if length is None else Claim(**vars(frame), claimed=length)).write()

    def close(self):
        self.pipe.close()
        self._listener.close()


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
        until(lambda: _logged(caplog, cause), cause)
    assert fabric.refused == {cause: 1}
    rogue.connect()
    rogue.numbered = fabric.endpoint.connections[1].received
    rogue.send(rogue.message(7))
    message = channel.wait("x", DEADLINE_SECONDS)
    assert message is not None
    assert torch.equal(message.x, fill(7))
    assert channel.receive("x") is None
    assert fabric.refused == {cause: 1}


def _logged(caplog, cause):
    return any(f"refused [{cause}, no. 1]" in record.message for record in list(caplog.records))


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


class TestOfAStranger:
    """Connections of those who cannot prove that they belong to the run."""

    def talk(self, fabric, say):
        port = fabric.endpoint.port
        with socket.create_connection(("127.0.0.1", port), timeout=10) as line, contextlib.suppress(OSError):
            say(line)
            line.shutdown(socket.SHUT_WR)
            while line.recv(1 << 16):
                pass

    def hello(self, **changes):
        fields = {
            "cipher_number": 1,
            "run": digest(RUN, size_bytes=16),
            "epoch": 0,
            "rank": 1,
            "incarnation": b"\0" * 16,
        }
        return Hello(**{**fields, **changes}).pack()

    @pytest.mark.parametrize(
        ("cause", "words"),
        [
            pytest.param("handshake", random.Random(0).randbytes(4096), id="noise"),
            ("handshake", b"GET / HTTP/1.1\r\n\r\n"),
            ("handshake", b"\0" * 50),
            ("run", {"run": b"\1" * 16}),
            ("epoch", {"epoch": 2**63}),
            ("epoch", {"epoch": 1}),
            ("handshake", {"cipher_number": 0}),
            ("key", {}),
        ],
        ids=lambda value: None if isinstance(value, bytes) else str(value),
    )
    def test_is_refused_and_counted(self, cause, words, caplog):
        with members(2) as fabrics, caplog.at_level(logging.WARNING, "murmurate.fabric.network.fabric"):
            said = words if isinstance(words, bytes) else self.hello(**words)
            self.talk(fabrics[0], lambda line: line.sendall(said))
            until(lambda: _logged(caplog, cause), cause)
            assert fabrics[0].refused == {cause: 1}
            self.still_works(fabrics)

    def still_works(self, fabrics):
        here, there = channels(fabrics)
        assert here.send(1, "x", fill(3))
        assert torch.equal(there.wait("x", DEADLINE_SECONDS).x, fill(3))

    @pytest.mark.parametrize("rank", [0, 1, 7, 2**32 - 1])
    def test_with_a_wrong_key_of_its_own(self, rank):
        """It knows the run, the ranks, the member's public key and the incarnation it imitates."""
        with members(2) as fabrics:
            endpoint = fabrics[0].endpoint
            imitated = endpoint.connections[1].record
            identity = Identity(incarnation=imitated.incarnation)
            card = PeerRecord(
                0,
                "127.0.0.1",
                endpoint.port,
                endpoint.credentials.identity.public,
                endpoint.credentials.identity.incarnation,
            )
            with pytest.raises((FrameRejected, Closed, OSError)):
                dial(credentials(rank, identity), card, 0, 5.0)
            if rank == 1:
                until(lambda: fabrics[0].refused == {"key": 1})
            self.still_works(fabrics)
            assert endpoint.connections[1].times_connected == 1, (
                "the true member's connection must not suffer"
            )

    def test_with_the_right_key_and_a_wrong_secret(self):
        with members(2) as fabrics:
            endpoint, mine = fabrics[0].endpoint, fabrics[1].endpoint.credentials
            thief = credentials(1, mine.identity, secret=b"guessed")
            card = fabrics[1].endpoint.connections[0].record
            with pytest.raises((FrameRejected, Closed, OSError)):
                dial(thief, card, 0, 5.0)
            until(lambda: fabrics[0].refused == {"key": 1})
            assert endpoint.connections[1].times_connected == 1
            self.still_works(fabrics)

    def test_who_says_nothing_is_ended_in_time(self, monkeypatch):
        monkeypatch.setattr(listener, "_HANDSHAKE_SECONDS", 0.1)
        with members(2) as fabrics:
            port = fabrics[0].endpoint.port
            with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
                line.sendall(self.hello()[:20])
                assert line.recv(1) == b""

    def test_while_no_more_files_can_be_opened_the_listener_waits(self, caplog):
        with members(2) as fabrics, caplog.at_level(logging.WARNING, "murmurate.fabric.network.fabric"):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            port = fabrics[0].endpoint.port
            with socket.socket() as line:
                gc.collect()  # what other tests have left would free places while this one runs
                highest = max(int(name) for name in os.listdir("/proc/self/fd"))
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
                fillers = []
                try:
                    with contextlib.suppress(OSError):
                        while True:
                            fillers.append(os.dup(0))
                    line.connect(("127.0.0.1", port))
                    until(lambda: fabrics[0].refused.get("resources", 0) > 2)
                finally:
                    for filler in fillers:
                        os.close(filler)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                assert 0 < sum("none can be accepted" in record.message for record in caplog.records) <= 2
                line.settimeout(20)
                line.sendall(b"x" * 200)
                until(lambda: fabrics[0].refused.get("handshake"), "it was accepted, read and refused")
            self.still_works(fabrics)

    def test_in_great_numbers_cannot_keep_members_apart(self, monkeypatch):
        monkeypatch.setattr(listener, "_HANDSHAKE_SECONDS", 600.0)  # none leaves by itself and makes room
        with cabled() as (fabrics, cable):
            port, threads = fabrics[0].endpoint.port, threading.active_count()
            lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(24)]
            until(lambda: fabrics[0].refused.get("crowd") == 18, "all but the bound of one address")
            assert len(fabrics[0].endpoint._listener._half_open) == 6
            until(lambda: threading.active_count() <= threads + 6)
            cable.snap()
            until(lambda: fabrics[0].endpoint.connections[1].times_connected > 1, "the member comes back")
            self.still_works(fabrics)
            for line in lines:
                line.close()


def test_a_member_without_the_secret_is_refused_at_the_rendezvous(caplog):
    store = dist.HashStore()

    def start(rank, secret):
        with pytest.raises(FabricError) as caught:
            NetworkFabric(rank, 2, store, run_id=RUN, secret=secret, deadline_seconds=0.5)
        return str(caught.value)

    with caplog.at_level(logging.WARNING, "murmurate.fabric.network.fabric"):
        one, other = at_once(lambda: start(0, SECRET), lambda: start(1, b"another"))
    assert "rank 1" in one
    assert "secret" in one
    assert "rank 0" in other
    assert any("refused [key" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"[1]", b"\xff", json.dumps({"rank": 0, "key": 5}).encode()),
        pytest.param(b"[" * 100_000, id="nested"),
    ],
)
def test_an_invalid_record_is_refused(text):
    with pytest.raises(ValueError, match="it is not a record"):
        PeerRecord.read(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": float("inf")}, "it is not a record"),
        ({"key": "00"}, "wrong length"),
        ({"port": 0}, "its port is 0"),
        ({"port": 1 << 16}, "its port is 65536"),
    ],
)
def test_a_record_with_an_impossible_value_is_refused(change, words):
    record = json.loads(PeerRecord(0, "127.0.0.1", 1, bytes(32), bytes(16)).pack())
    with pytest.raises(ValueError, match=words):
        PeerRecord.read(json.dumps({**record, **change}).encode())


def test_a_member_that_does_not_arrive_is_named():
    with pytest.raises(FabricError, match=r"rank 0 waited 0\.2 s for rank 1 at the rendezvous"):
        NetworkFabric(0, 2, dist.HashStore(), run_id=RUN, deadline_seconds=0.2)


@pytest.mark.parametrize("way", ["cut", "close"])
def test_members_without_a_connection_between_them_are_refused_at_the_start(way):
    """Packets to the address of rank 0 are dropped, or nothing listens there: both would train alone."""
    store = dist.HashStore()
    detour = Detour(store)
    detour.cable = Cable(0)
    getattr(detour.cable, way)()

    def start(rank, where):
        with pytest.raises(FabricError, match=r"no connection to rank\(s\) \d .*MURMURATE_ADDRESS") as caught:
            NetworkFabric(
                rank, 2, where, run_id=RUN, secret=SECRET, deadline_seconds=1.0, silence_seconds=1.0
            )
        return str(caught.value)

    here, there = at_once(lambda: start(0, store), lambda: start(1, detour))
    detour.cable.close()
    assert here.startswith("rank 0 has no connection to rank(s) 1 (127.0.0.1 port ")
    assert there.startswith(f"rank 1 has no connection to rank(s) 0 (127.0.0.1 port {detour.cable.port})")


def test_the_missing_package_is_named_with_its_extra(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "cryptography" else find(name, *rest)
    )
    with pytest.raises(MissingExtra, match=r"pip install 'murmurate\[network\]'"):
        NetworkFabric(0, 1, dist.HashStore(), run_id=RUN)


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
