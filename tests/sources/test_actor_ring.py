"""The memory between actors and their learner: records come whole and in order, parameters in one version."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch

from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replay.interface import Steps
from murmurate.sources.shared_ring import SLOTS, ActorRing, ActorStep, SharedParameters
from murmurate.spec import EnvSpec, Episode
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(2 * DEADLINE_SECONDS)
SPEC = EnvSpec("toy", (2, 3), torch.uint8, actions=4)


def steps(number: int, values: bool = True) -> Steps:
    """A step of three simulators of which every entry tells its number."""
    return Steps(
        torch.full((3, 2, 3), number % 256, dtype=torch.uint8),
        torch.full((3,), number),
        torch.full((3,), float(number)),
        torch.full((3, 2, 3), (number + 1) % 256, dtype=torch.uint8),
        torch.tensor([number % 2 == 0, False, False]),
        torch.tensor([False, number % 3 == 0, False]),
        *((torch.full((3,), number + 0.25), torch.full((3,), number + 0.5)) if values else ()),
    )


def put_many(descriptor: int, count: int) -> None:
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    ring = ActorRing(SharedMemoryFile(descriptor), SPEC, 3)
    for number in range(count):
        until(lambda: ring.has_room, every=1e-4)
        episodes = [Episode(1, number / 4, number, success=number % 2 == 0)] * (number % 3)
        ring.put(ActorStep(steps(number, values=number % 5 > 0), episodes, version=number))


def test_records_come_whole_and_in_order_from_another_process() -> None:
    memory_file = SharedMemoryFile.create()
    ring = ActorRing(memory_file, SPEC, 3)
    process = multiprocessing.get_context("fork").Process(
        target=put_many, args=(memory_file.descriptor, 500), daemon=True
    )
    process.start()
    for number in range(500):
        until(lambda: ring.waiting_records, every=1e-5)
        assert ring.waiting_records <= SLOTS
        record = ring.oldest()
        sent = steps(number, values=number % 5 > 0)
        assert record.steps.behaviour == sent.behaviour == {}
        for name, expected in list(sent._asdict().items())[:-1]:
            result = getattr(record.steps, name)
            assert (result is None) if expected is None else torch.equal(result, expected), name
        assert record.version == number
        ended = Episode(1, number / 4, number, success=number % 2 == 0)
        assert record.episodes == [ended] * (number % 3)
        ring.drop()
    process.join()
    memory_file.close()


def test_a_full_ring_has_room_again_when_half_of_it_is_free() -> None:
    memory_file = SharedMemoryFile.create()
    writer, reader = (
        ActorRing(memory_file, SPEC, 3),
        ActorRing(SharedMemoryFile(memory_file.descriptor), SPEC, 3),
    )
    record = ActorStep(steps(0), [], version=0)
    for _ in range(3):  # the same after any number of rounds
        while writer.has_room:
            writer.put(record)
        assert reader.waiting_records == SLOTS
        while reader.waiting_records > SLOTS // 2:
            assert not writer.has_room
            reader.drop()
        assert writer.has_room
        writer.put(record)
        assert writer.has_room  # it fills up before it rests again
    memory_file.close()


def publish_for_ever(descriptor: int, count: int) -> None:
    torch.set_num_threads(1)
    weights = SharedParameters(SharedMemoryFile(descriptor), count)
    version = 0
    while True:
        version += 1
        weights.publish(torch.full((count,), float(version)), version)


def test_no_version_is_ever_read_in_part() -> None:
    count = 100_000
    memory_file = SharedMemoryFile.create()
    weights = SharedParameters(memory_file, count)
    process = multiprocessing.get_context("fork").Process(
        target=publish_for_ever, args=(memory_file.descriptor, count), daemon=True
    )
    process.start()
    into, seen = torch.empty(count), set()
    least, most = time.monotonic() + 0.7, time.monotonic() + 60.0
    while time.monotonic() < least or (len(seen) <= 5 and time.monotonic() < most):
        version = weights.read(into)
        assert (into == version).all()
        seen.add(version)
    process.kill()
    process.join()
    memory_file.close()
    assert len(seen) > 5
