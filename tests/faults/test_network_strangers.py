"""Who is not of a run of the network fabric, or does not arrive: refused through real sockets, and named."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import resource
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from fabric.networked import RUN, SECRET, Cable, Detour, at_once, cabled, channels, fill, members
from faults.rogue import credentials, logged
from murmurate.errors import MissingExtra
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network import listener
from murmurate.fabric.network.crypto import Identity, PeerRecord
from murmurate.fabric.network.endpoint import digest
from murmurate.fabric.network.fabric import NetworkFabric
from murmurate.fabric.network.frames import Closed, FrameRejected
from murmurate.fabric.network.handshake import Hello, dial
from waiting import DEADLINE_SECONDS, until


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
            until(lambda: logged(caplog, cause), cause)
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
