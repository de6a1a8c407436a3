"""A sampler process between a learner and two shards, which are this test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from murmurate.sources import service_links, service_sampler
from murmurate.sources.service_links import MESSAGE_BYTES, DrawReply, DrawRequest, ShardAddress, Stream
from murmurate.sources.service_processes import SamplerProcess
from murmurate.sources.service_sampler import SamplerLoop, SamplerSettings
from murmurate.sources.service_slots import DRAWING, READY, BatchSlots, SlotLayout
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(2 * DEADLINE_SECONDS)
LAYOUT = SlotLayout(slots=1, block=3, batch=4, parts=2, columns=(("keys", 8), ("errors", 4)))


class Shard:
    """The shard's end: what it is asked, and its answers."""

    def __init__(self, index: int) -> None:
        self.address = ShardAddress(0, index, service_links.new_socket_name())
        self._listener = service_links.listen(self.address.name)
        self._link: socket.socket | None = None
        self._slots: BatchSlots | None = None

    def accept(self) -> None:
        """The next connection of the sampler."""
        self._listener.settimeout(DEADLINE_SECONDS)
        self._link, _ = self._listener.accept()
        self._link.settimeout(DEADLINE_SECONDS)
        self._slots = service_links.accept(self._link)

    def asked(self) -> DrawRequest:
        assert self._link is not None
        return DrawRequest.read(self._link.recv(MESSAGE_BYTES))

    def answer(self, request: DrawRequest) -> None:
        assert self._slots is not None
        assert self._link is not None
        self._slots.fill(request.slot, request.part, request.number)
        self._link.send(DrawReply(request.slot, request.part, request.number).pack())

    def end(self) -> None:
        self._listener.close()
        if self._link is not None:
            self._link.close()


def test_dialling_hosts_that_do_not_answer_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def dial(*arguments: object) -> socket.socket:
        beats.append(sampler._slots.beats)
        raise TimeoutError

    monkeypatch.setattr(service_sampler, "dial", dial)
    beats: list[float] = []
    ready, wake = os.eventfd(0), os.eventfd(0)
    memory = os.memfd_create("slots")
    os.truncate(memory, LAYOUT.size_bytes)
    sampler = SamplerLoop(SamplerSettings(Stream(0, 0, "token"), LAYOUT, memory, wake, ready))
    sampler.addresses.put({k: ShardAddress(0, k, f"shard {k}") for k in range(3)})
    sampler._connect()
    assert len(set(beats)) == 3
    for descriptor in (ready, wake, memory):
        os.close(descriptor)


@pytest.fixture
def service() -> Iterator[tuple[SamplerProcess, list[Shard], int]]:
    ready = os.eventfd(0, os.EFD_NONBLOCK)
    shards = [Shard(0), Shard(1)]
    sampler = SamplerProcess(LAYOUT, rank=0, index=0, ready=ready)
    sampler.slots.set_exponents(0.5, -1.0)
    sampler.start({shard.address.index: shard.address for shard in shards})
    for shard in shards:
        shard.accept()
    yield sampler, shards, ready
    sampler.close()
    for shard in shards:
        with contextlib.suppress(OSError):
            shard.end()
    os.close(ready)


def expect(shard: Shard, part: int, number: int, error_bits: int = 0) -> DrawRequest:
    request = shard.asked()
    assert request == DrawRequest(0, part, number, error_bits, 0.5, -1.0)
    return request


def test_each_shard_is_asked_for_its_part_and_gets_its_errors(
    service: tuple[SamplerProcess, list[Shard], int],
) -> None:
    sampler, (one, two), ready = service
    one.answer(expect(one, 0, 1))
    two.answer(expect(two, 1, 1))
    until(lambda: sampler.slots.state(0) == READY)

    def told() -> int:
        with contextlib.suppress(BlockingIOError):  # it writes this a moment after the slot's state
            return os.eventfd_read(ready)
        return 0

    assert until(told) == 1
    sampler.slots.release(0, error_bits=0b101)
    sampler.wake()
    expect(two, 1, 2, 0b101)
    expect(one, 0, 2, 0b101)
    assert sampler.slots.state(0) == DRAWING
    assert sampler.watched.process is not None
    maps = Path(f"/proc/{sampler.watched.process.pid}/maps").read_text()
    assert "libtorch" not in maps, "it starts at once and takes little memory"


def test_a_successor_asks_for_what_is_missing_by_the_same_number(
    service: tuple[SamplerProcess, list[Shard], int],
) -> None:
    sampler, (one, two), _ = service
    one.answer(expect(one, 0, 1))
    expect(two, 1, 1)
    assert sampler.watched.process is not None
    os.kill(sampler.watched.process.pid, signal.SIGKILL)
    until(lambda: sampler.watched.cause_of_death(0) == "signal 9")
    sampler.watched.kill()
    sampler.start({shard.address.index: shard.address for shard in (one, two)})
    for shard in (one, two):
        shard.accept()
    two.answer(expect(two, 1, 1))
    until(lambda: sampler.slots.state(0) == READY)
    sampler.slots.release(0, error_bits=0)
    sampler.wake()
    expect(one, 0, 2)  # it was asked for nothing in between
    expect(two, 1, 2)


def test_another_shard_takes_the_part_of_one_that_ends_but_not_its_errors(
    service: tuple[SamplerProcess, list[Shard], int],
) -> None:
    sampler, (one, two), _ = service
    one.answer(expect(one, 0, 1))
    two.answer(expect(two, 1, 1))
    until(lambda: sampler.slots.state(0) == READY)
    two.end()
    until(lambda: sampler.slots.shards == 1)
    sampler.slots.release(0, error_bits=0b111)
    sampler.wake()
    one.answer(expect(one, 0, 2, 0b111))
    one.answer(expect(one, 1, 2, 0))
    until(lambda: sampler.slots.state(0) == READY)
    # the learner of the ended shard is started again, and has another
    new = Shard(1)
    sampler.send({1: new.address})
    new.accept()
    until(lambda: sampler.slots.shards == 2)
    sampler.slots.release(0, error_bits=0b111)
    sampler.wake()
    expect(one, 0, 3, 0b111)
    expect(new, 1, 3, 0)
    new.end()


def test_a_shard_in_the_place_of_another_gets_none_of_its_errors(
    service: tuple[SamplerProcess, list[Shard], int],
) -> None:
    """As where a learner is started again while a batch of its former shard is learned from: the keys of
    that batch mean other rows in the new shard."""
    sampler, (one, two), _ = service
    one.answer(expect(one, 0, 1))
    two.answer(expect(two, 1, 1))
    until(lambda: sampler.slots.state(0) == READY)
    new = Shard(1)
    sampler.send({1: new.address})
    new.accept()
    sampler.slots.release(0, error_bits=0b111)
    sampler.wake()
    expect(one, 0, 2, 0b111)
    expect(new, 1, 2, 0)
    new.end()


def test_a_part_that_was_asked_of_a_shard_that_ends_is_asked_of_another(
    service: tuple[SamplerProcess, list[Shard], int],
) -> None:
    sampler, (one, two), _ = service
    one.answer(expect(one, 0, 1))
    expect(two, 1, 1)
    two.end()
    one.answer(expect(one, 1, 1))
    until(lambda: sampler.slots.state(0) == READY)
