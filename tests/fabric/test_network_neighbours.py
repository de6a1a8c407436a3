"""Members of one host: vectors stay in memory, whole, in order and once; where not, TCP takes over."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from fabric.networked import at_once, cabled, channels, members, until
from murmurate.fabric._neighbour import Lender, Neighbour, Region

N = 200_000  # a vector of 800 kB, and one of two pieces
LIKE = torch.zeros(N)


def vector(value):
    return torch.full((N,), float(value))


def lends(fabric, peer):
    return fabric.hub.links[peer].lends


@pytest.mark.parametrize("encrypt", [True, False])
def test_vectors_do_not_go_over_the_line(encrypt):
    with cabled(encrypt=encrypt) as (fabrics, cable):
        assert lends(fabrics[0], 1)
        assert lends(fabrics[1], 0)
        here, there = channels(fabrics, like=LIKE)
        for value in range(8):
            here.send(1, "x", vector(value))
            there.publish(vector(-value))
            assert torch.equal(there.wait("x", 20.0).x, vector(value))
            assert here.wait_newer([1], [value], 20.0)
            assert torch.equal(here.peek(1)[0], vector(-value))
        x, y = vector(1), vector(3)
        assert at_once(lambda: here.mean_(x), lambda: there.mean_(y)) == [2, 2]
        assert torch.equal(x, vector(2))
        assert cable.carried_bytes < LIKE.nbytes / 10
        assert all(not fabric.refused for fabric in fabrics)


def test_who_does_not_want_to_share_memory_is_sent_everything():
    with cabled(shared_memory=False) as (fabrics, cable):
        assert not lends(fabrics[0], 1)
        here, there = channels(fabrics, like=LIKE)
        here.send(1, "x", vector(1))
        assert torch.equal(there.wait("x", 20.0).x, vector(1))
        assert cable.carried_bytes > LIKE.nbytes


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
                    assert reader.wait_newer([0], [turn], 20.0)
                    x, version = reader.peek(0)
                    assert (x == version).all()
        finally:
            over.set()
            thread.join()


def test_each_letter_comes_once_though_the_connection_snaps():
    with cabled() as (fabrics, cable):
        here, there = channels(fabrics, like=LIKE)
        snaps = 0
        for value in range(40):
            if value % 8 == 3:
                cable.snap()
                snaps += 1
            assert here.send(1, "x", vector(value))
            if value >= 20:
                assert torch.equal(there.wait("x", 20.0).x, vector(value - 20))
        for value in range(20, 40):
            assert torch.equal(there.wait("x", 20.0).x, vector(value))
        assert fabrics[0].hub.links[1].connections > snaps / 2


def test_memory_that_cannot_be_mapped_is_sent_instead(monkeypatch):
    with members(2) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        opened = os.open

        def refuse(path, *rest):
            if str(path).startswith("/proc/"):
                raise PermissionError("not yours")
            return opened(path, *rest)

        monkeypatch.setattr(os, "open", refuse)
        here.send(1, "x", vector(5))
        assert torch.equal(there.wait("x", 20.0).x, vector(5))
        assert fabrics[1].refused == {"memory": 1}
        assert until(lambda: not lends(fabrics[0], 1))


def test_without_descriptors_vectors_are_sent(monkeypatch):
    with cabled() as (fabrics, cable):
        here, there = channels(fabrics, like=LIKE)

        def refuse(*_):
            raise OSError("too many open files")

        monkeypatch.setattr(os, "memfd_create", refuse)
        here.send(1, "x", vector(5))
        assert torch.equal(there.wait("x", 20.0).x, vector(5))
        assert cable.carried_bytes > LIKE.nbytes


def test_descriptors_are_given_back():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with members(2) as fabrics:
        here, there = channels(fabrics, like=LIKE)
        for value in range(30):
            here.publish(vector(value))
            here.send(1, "x", vector(value))
            there.wait("x", 20.0)
        assert len(os.listdir("/proc/self/fd")) < before + 30
    del fabrics, here, there
    assert until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) <= before)


def test_only_the_process_itself_is_taken_for_it():
    me, other = Lender(b"m" * 16), Lender(b"o" * 16)
    assert isinstance(me.neighbour(os.getpid(), other.descriptor, b"o" * 16), Neighbour)
    assert me.neighbour(os.getpid(), other.descriptor, b"x" * 16) is None
    assert me.neighbour(os.getpid(), me.descriptor, b"o" * 16) is None
    assert me.neighbour(2**22 + 1, other.descriptor, b"o" * 16) is None
    assert me.neighbour(os.getpid(), -1, b"o" * 16) is None


def test_what_is_no_file_of_ours_is_neither_opened_nor_read():
    """A stranger could name any descriptor of any process: a pipe would be emptied, or waited for."""
    me = Lender(b"m" * 16)
    read, write = os.pipe()
    os.write(write, b"o" * 16)
    assert me.neighbour(os.getpid(), read, b"o" * 16) is None
    assert os.read(read, 100) == b"o" * 16
    assert me.neighbour(os.getpid(), read, b"o" * 16) is None  # and nobody waits for more
    os.close(read)
    os.close(write)


def test_another_file_under_the_descriptor_is_not_read():
    me, other = Lender(b"m" * 16), Lender(b"o" * 16)
    lent, else_ = other.buffer(1 << 20), other.buffer(1 << 20)
    assert isinstance(lent, Region)
    lent[:] = 7
    neighbour = me.neighbour(os.getpid(), other.descriptor, b"o" * 16)
    assert (neighbour.look(lent.place) == 7).all()
    with pytest.raises(OSError, match="another file"):
        neighbour.look(else_.place._replace(descriptor=lent.place.descriptor))
    assert me.neighbour(os.getpid(), other.descriptor, b"o" * 16) is None


def test_a_part_of_a_region_has_no_place():
    whole = Lender(b"m" * 16).buffer(1 << 20)
    assert whole[:].place == whole.place
    assert whole[:100].place is None
    assert whole[100:].place is None
