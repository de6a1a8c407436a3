"""What a shard stores and draws, in this process: records in order, joined inserts, weights of a mixture."""

from __future__ import annotations

import dataclasses
import fcntl
import resource
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from murmurate.bench._numbered import SPEC
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Steps
from murmurate.replay.priorities import Prioritized
from murmurate.sources import service_links
from murmurate.sources.service_control import batch_fields, receive_state, row_tensors, send_state
from murmurate.sources.service_links import DrawReply, DrawRequest, ShardAddress
from murmurate.sources.service_shard import ReplayShard, ShardSettings, _Link, joined
from murmurate.sources.service_slots import BatchSlots, SlotLayout, SlotRows
from murmurate.sources.shared_ring import ActorRing, ActorStep
from murmurate.spec import Episode

SIZES = (2, 3, 1)
CONFIG = ReplayConfig(capacity=1_000, learning_starts=6, samples_per_insert=2.0, alpha=1.0, epsilon=0.0)
FIELDS = batch_fields(SPEC, {})


@dataclasses.dataclass(frozen=True)
class OwnSampler(ReplayConfig):
    """Draws by priority, though its exponent is 0."""

    def new_sampler(self, slots: int, seed: int, threads: int = 1) -> Prioritized:
        return Prioritized(slots, alpha=1.0, epsilon=0.0, seed=seed)


OWN = OwnSampler(capacity=1_000, learning_starts=6, samples_per_insert=2.0, alpha=0.0)


def opened(config: ReplayConfig = CONFIG, **changes: Any) -> tuple[ReplayShard, list[ActorRing]]:
    """A shard of three actors, which are this test."""
    files = [SharedMemoryFile.create() for _ in SIZES]
    rings = [ActorRing(file, SPEC, size) for file, size in zip(files, SIZES, strict=True)]
    firsts = [sum(SIZES[:k]) for k in range(len(SIZES))]
    name = service_links.new_socket_name()
    settings = ShardSettings(
        ShardAddress(0, 0, name),
        SPEC,
        dataclasses.replace(config, **changes),
        slack=50,
        steps=1,
        discount=0.9,
        behaviour={},
        seed=0,
        threads=1,
        rings=tuple(zip((file.descriptor for file in files), firsts, SIZES, strict=True)),
        listener=service_links.listen(name).detach(),
        counts=SharedMemoryFile.create().descriptor,
    )
    _, theirs = pair = socket.socketpair()
    shard = ReplayShard(settings, Connection(theirs.detach()))
    shard.pair = pair  # type: ignore[attr-defined]  # its ends stay open
    return shard, rings


def record(size: int, reward: float, error: float | None = None, **fields: Any) -> ActorStep:
    """A step whose transitions have these rewards and initial errors."""
    seen, flags = torch.full((size, 17), reward), torch.zeros(size, dtype=torch.bool)
    values = () if error is None else (torch.full((size,), reward - error), torch.zeros(size))
    steps = Steps(seen, torch.zeros(size, 6), torch.full((size,), reward), seen + 1, flags, flags, *values)
    return ActorStep(steps, [], version=3, **fields)


def stored(shard: ReplayShard) -> list[float]:
    rows: Any = shard.replay
    return rows.rows.column("reward")[: len(shard.replay)].tolist()


def test_records_of_neighbours_are_stored_as_if_one_by_one() -> None:
    shard, rings = opened()
    for turn in range(2):
        for k, ring in enumerate(rings):
            ring.put(record(SIZES[k], 10.0 * turn + k, 0.5 if turn else None))
    assert shard._insert()
    assert shard._insert()
    assert not shard._insert()
    assert stored(shard) == [0, 0, 1, 1, 1, 2, 10, 10, 11, 11, 11, 12]
    assert [ring.waiting_records for ring in rings] == [0, 0, 0]
    assert shard.limiter.inserted == 12
    priorities = shard.replay.sampler.tree.priorities[:12]  # type: ignore[attr-defined]
    torch.testing.assert_close(priorities, torch.tensor([1.0] * 6 + [0.5] * 6))


def test_records_without_neighbours_and_with_and_without_values_are_kept_apart() -> None:
    shard, rings = opened()
    rings[0].put(record(2, 1.0, 0.25))
    rings[2].put(record(1, 2.0))
    assert shard._insert()
    rings[0].put(record(2, 3.0))
    rings[1].put(record(3, 4.0, 0.25))
    shard._insert()
    assert stored(shard) == [1, 1, 2, 3, 3, 4, 4, 4]
    priorities = shard.replay.sampler.tree.priorities[:8]  # type: ignore[attr-defined]
    torch.testing.assert_close(priorities, torch.tensor([0.25, 0.25, 1, 1, 1, 0.25, 0.25, 0.25]))


def test_actors_wait_beyond_the_slack_in_turn() -> None:
    shard, rings = opened()
    for _ in range(100):
        for k, ring in enumerate(rings):
            if ring.has_room:
                ring.put(record(SIZES[k], 1.0))
        shard._insert()
    assert 50 < shard.limiter.inserted <= 6 + 50
    assert all(ring.waiting_records for ring in rings)
    taken = [feed.taken for feed in shard._feeds]
    assert max(taken) - min(taken) <= 1


def test_an_actors_successor_ends_what_it_left_and_a_gap_is_refused() -> None:
    shard, rings = opened()
    rings[1].put(record(3, 1.0))
    shard._insert()
    rings[1].put(record(3, 2.0, incarnation=1))
    shard._insert()
    assert shard._feeds[1].incarnation == 1
    rings[1].put(record(3, 3.0))
    rings[1]._counters[1] += 1  # as if it had been taken
    rings[1].put(record(3, 4.0))
    with pytest.raises(RuntimeError, match="record 3 of an actor came where 2 was due"):
        shard._insert()


def test_episodes_are_told_by_the_shards_simulators() -> None:
    shard, rings = opened()
    ended = dataclasses.replace(record(3, 1.0), episodes=[Episode(1, 5.0, 7, success=True)])
    rings[1].put(ended)
    shard._insert()
    assert list(shard._episodes) == [Episode(3, 5.0, 7, success=True)]


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1_100, reason="few files may be open")
def test_episodes_are_sent_with_any_number_of_open_files() -> None:
    shard, _ = opened()
    ours, theirs = socket.socketpair()
    shard._control = Connection(fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 1_100))
    shard._episodes.append(Episode(3, 5.0, 7))
    shard._report_counts()
    assert Connection(ours.detach()).recv() == ("episodes", [Episode(3, 5.0, 7)])


@pytest.mark.parametrize("config", [CONFIG, OWN])
def test_weights_are_those_of_one_mixture_of_all_shards(config: ReplayConfig) -> None:
    """Two shards with other priorities: (N P(i)) ** -beta over the greatest, P(i) = share * p_i / sum p."""
    layout = SlotLayout(1, 2, 50, 2, tuple((n, s) for n, s in _sizes().items()))
    slots = BatchSlots(memoryview(bytearray(layout.size_bytes)), layout)
    errors = ([0.5, 1.0, 4.0], [0.01, 0.3, 0.2])
    slots.begin(0)
    chances: dict[float, float] = {}
    for part, of_shard in enumerate(errors):
        shard, rings = opened(config)
        total = sum(size * error for size, error in zip(SIZES, of_shard, strict=True))
        for _ in range(5):  # 30 transitions, more than a batch's part
            for k, (ring, error) in enumerate(zip(rings, of_shard, strict=True)):
                ring.put(record(SIZES[k], 10 * part + k, error))
                chances[10 * part + k] = 0.5 * error / total
            shard._insert()
        shard._draw(_Link(socket.socket(), FIELDS, False), slots, DrawRequest(0, part, 1, 0, 0.7, -1.0))
    assert slots.finish(0)
    for number in range(layout.block):
        columns = row_tensors(slots, FIELDS, 0, SlotRows(50 * number, 50 * number + 50))
        rewards = columns["reward"].tolist()
        assert all(r < 10 for r in rewards[:25])
        assert all(r >= 10 for r in rewards[25:])
        weights = torch.tensor([chances[r] ** -0.7 for r in rewards])
        torch.testing.assert_close(
            columns["weights"] / columns["weights"].max(), weights / weights.max(), rtol=1e-4, atol=1e-6
        )
        assert torch.equal(columns["observation"][:, 0], columns["reward"])
        assert torch.equal(columns["next_observation"], columns["observation"] + 1)


def test_a_draw_that_two_connections_ask_for_is_made_once() -> None:
    """A sampler was killed, and its successor asks before the end of its connection is noticed."""
    layout = SlotLayout(1, 1, 4, 1, tuple(_sizes().items()))
    slots = BatchSlots(memoryview(bytearray(layout.size_bytes)), layout)
    shard, rings = opened()
    slots.begin(0)
    ends = []
    for _ in range(2):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.append(mine)
        shard._take_request(_Link(theirs, FIELDS, False, slots), slots, DrawRequest(0, 0, 1, 0, 0.7, -1.0))
    assert not shard._serve(), "nothing may be drawn yet"
    for _ in range(2):
        for k, ring in enumerate(rings):
            ring.put(record(SIZES[k], 1.0 + k, 0.3))
        shard._insert()
    assert shard._serve()
    assert shard.limiter.drawn == 4
    assert [DrawReply.read(end.recv(64)) for end in ends] == [DrawReply(0, 0, 1)] * 2
    assert not shard._requests
    before = shard.replay.sampler.tree.priorities[:12].clone()  # type: ignore[attr-defined]
    late = DrawRequest(0, 0, 1, 1, 0.7, -1.0)  # with errors of the batch that was there before
    shard._take_request(_Link(theirs, FIELDS, False, slots), slots, late)
    assert torch.equal(shard.replay.sampler.tree.priorities[:12], before)  # type: ignore[attr-defined]


def test_errors_become_priorities_of_the_batches_that_have_some() -> None:
    layout = SlotLayout(1, 3, 4, 1, tuple(_sizes().items()))
    slots = BatchSlots(memoryview(bytearray(layout.size_bytes)), layout)
    shard, rings = opened()
    for _ in range(4):
        for k, ring in enumerate(rings):
            ring.put(record(SIZES[k], 1.0 + k, 0.3))
        shard._insert()
    link = _Link(socket.socketpair()[0], FIELDS, False, slots)
    slots.begin(0)
    shard._take_request(link, slots, DrawRequest(0, 0, 1, 0, 0.7, -1.0))
    assert shard._serve()
    expected = torch.full((24,), 0.3)
    for number in range(3):
        columns = row_tensors(slots, FIELDS, 0, SlotRows(4 * number, 4 * number + 4))
        columns["errors"].fill_(-2.0 - number)
        if number != 1:
            expected[columns["keys"]] = 2.0 + number
    slots.begin(0)
    shard._take_request(link, slots, DrawRequest(0, 0, 2, 0b101, 0.7, -1.0))
    torch.testing.assert_close(shard.replay.sampler.tree.priorities[:24], expected)  # type: ignore[attr-defined]


def _sizes() -> dict[str, int]:
    return {n: int(torch.tensor(shape).prod()) * kind.itemsize for n, (shape, kind) in FIELDS.items()}


def test_state_is_sent_whole_and_a_shard_that_loads_it_goes_on() -> None:
    shard, rings = opened()
    for _ in range(3):
        for k, ring in enumerate(rings):
            ring.put(record(SIZES[k], float(k), 0.3))
        shard._insert()
    ours, theirs = socket.socketpair()
    send_state(Connection(ours.detach()), shard.state())
    state = receive_state(Connection(theirs.detach()))
    assert (state["inserted"], state["drawn"]) == (18, 0)
    other, _ = opened()
    other.load(state)
    assert stored(other) == stored(shard)
    assert other.limiter == shard.limiter
    alone = open_replay(CONFIG, SPEC, simulators=6, steps=1, discount=0.9, seed=0)
    alone.load(state["store"])
    assert torch.equal(alone.sample(8, 0.5).keys, shard.replay.sample(8, 0.5).keys), "and it draws alike"


def test_joined_steps_are_all_fields_one_after_another() -> None:
    one, two = record(2, 1.0, 0.5).steps, record(3, 2.0, 0.5).steps
    one, two = (s._replace(behaviour={"v": torch.full((n,), float(n))}) for s, n in ((one, 2), (two, 3)))
    both = joined([one, two])
    for name in Steps._fields[:-1]:
        assert torch.equal(getattr(both, name), torch.cat([getattr(one, name), getattr(two, name)])), name
    assert both.behaviour["v"].tolist() == [2, 2, 3, 3, 3]
