"""Replay that four actor processes fill through shared memory, compared with one that its learner fills."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from murmurate.bench import _roles
from murmurate.bench._result import Log, median, ratios, spreads
from murmurate.errors import Refusal
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.ranges import PositiveFloat, PositiveInt, PositiveSeconds
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Steps
from murmurate.sources.polling import Backoff, use_batch_scheduling
from murmurate.sources.replay_sampler import ReplaySampler
from murmurate.sources.shared_ring import ActorRing, ActorStep
from murmurate.spec import Batch, EnvSpec

NAME = "replay-shared"
SUMMARY = (
    "draws per CPU second of learners that four actors feed through shared memory, and of a single process"
)

_SPEC = EnvSpec("rows", (17,), torch.float32, actions=0, action_shape=(6,))
_RECORDS = 64  # made beforehand and sent in turn, so that only the replay is measured


@dataclasses.dataclass(frozen=True)
class SharedReplayPlan:
    """seconds: duration of a measurement. repetitions: number of repetitions of each measurement. learners:
    the numbers of learners that are measured. actors: number of actors that insert. simulators: number of
    simulators of each actor. capacity: rows of the replay. filled: rows before the first draw. batch: rows of
    a draw. samples_per_insert: how often each row is drawn.
    """

    seconds: PositiveSeconds = 5.0
    repetitions: PositiveInt = 3
    learners: tuple[PositiveInt, ...] = (1, 2)
    actors: PositiveInt = 4
    simulators: PositiveInt = 16
    capacity: PositiveInt = 2**20
    filled: PositiveInt = 2**16
    batch: PositiveInt = 256
    samples_per_insert: PositiveFloat = 8.0


QUICK, FULL = SharedReplayPlan(), SharedReplayPlan(seconds=20.0)


def measure(plan: SharedReplayPlan, log: Log) -> dict[str, Any]:
    """Only the learner writes to its replay. Actors put records in rings, and wait while these are full.

    ``share_of_alone`` is a case's draws per CPU second over those of one learner without actors. The cases
    "apart" are processes that each fill their own replay and share nothing: what they lose is due to the
    caches and the memory bandwidth that cores share. Raises Refusal for a capacity below a batch.
    """
    if plan.capacity < plan.batch:
        raise Refusal(
            f"--capacity is {plan.capacity} and a batch is {plan.batch}: it would never be full. Use "
            f"--capacity {plan.batch} at least."
        )
    cases = {"alone": (1, 0)} | {f"{n} apart": (n, 0) for n in plan.learners if n > 1}
    cases |= {f"{n} learner{'s' * (n > 1)}": (n, plan.actors) for n in plan.learners}
    rows: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(plan.repetitions):
        for case, (learners, actors) in cases.items():
            log(f"{case}, {number + 1} of {plan.repetitions}")
            answers = _roles.run_together(
                learners + actors, work, learners, bool(actors), plan, seconds=plan.seconds
            )
            rows[case].append(_totals(answers, learners))
    alone = [row["draws_per_cpu_second"] for row in rows["alone"]]
    return {
        "cases": {case: spreads(measured) for case, measured in rows.items()},
        "share_of_alone": {
            case: median(ratios([row["draws_per_cpu_second"] for row in measured], alone))
            for case, measured in rows.items()
            if case != "alone"
        },
        "lost_records": sum(row["lost_records"] for measured in rows.values() for row in measured),
    }


def _totals(answers: list[dict[str, float]], learners: int) -> dict[str, float]:
    learner_answers = answers[:learners]
    put, taken, misplaced = (sum(a.get(key, 0) for a in answers) for key in ("put", "taken", "out_of_order"))
    return {
        "draws_per_cpu_second": sum(a["draws"] for a in learner_answers)
        / sum(a["cpu_seconds"] for a in learner_answers),
        "draws_per_second": sum(a["draws"] / a["wall_seconds"] for a in learner_answers),
        "inserts_per_second": sum(a["inserts"] / a["wall_seconds"] for a in learner_answers),
        "lost_records": abs(put - taken) + misplaced,
    }


def work(fabric: ProcessFabric, learners: int, shared: bool, plan: SharedReplayPlan) -> dict[str, float]:
    """What one member measures. Learners are the first members; if ``shared``, actors follow, of which each
    feeds all learners in turn."""
    if not shared:
        return _learn(_OwnRecords(plan), plan)
    pairs = list(itertools.product(range(learners), range(plan.actors)))
    rings = {pair: ActorRing(fabric.memory_file, _SPEC, plan.simulators) for pair in pairs}
    stop = fabric.memory_file.counters("stop", (learners,))
    ended = fabric.memory_file.counters("ended", (plan.actors,))
    if fabric.rank >= learners:
        actor = fabric.rank - learners
        put = _act([rings[learner, actor] for learner in range(learners)], stop, plan)
        ended[actor] = 1
        return {"put": put}
    own_rings = [rings[fabric.rank, actor] for actor in range(plan.actors)]
    feed = _RingRecords(own_rings, plan.simulators)
    try:
        figures = _learn(feed, plan)
    finally:
        stop[fabric.rank] = 1
    all_ended, pauses = False, Backoff()
    while not all_ended:  # actors go on until all learners have stopped
        all_ended = bool(ended.all())
        feed.drain()
        pauses.sleep()
    return figures | {"taken": feed.taken, "out_of_order": feed.out_of_order}


def _records(plan: SharedReplayPlan) -> Iterator[ActorStep]:
    """An endless stream of numbered records of one episode."""
    generator = torch.Generator().manual_seed(0)
    all_false = torch.zeros(plan.simulators, dtype=torch.bool)
    steps = []
    for _ in range(_RECORDS):
        observations = torch.randn(2, plan.simulators, *_SPEC.observation_shape, generator=generator)
        action = torch.randn(plan.simulators, *_SPEC.action_shape, generator=generator)
        reward, value, next_value = torch.randn(3, plan.simulators, generator=generator)
        steps.append(
            Steps(observations[0], action, reward, observations[1], all_false, all_false, value, next_value)
        )
    for number in itertools.count():
        yield ActorStep(steps[number % _RECORDS], [], number)


class _OwnRecords:
    """Records made by the learner itself. ``next`` returns (number of the record's first simulator, record),
    which is valid until ``release``."""

    def __init__(self, plan: SharedReplayPlan) -> None:
        self._records = _records(plan)
        self._first_simulators = itertools.cycle(range(0, plan.actors * plan.simulators, plan.simulators))

    def next(self) -> tuple[int, ActorStep]:
        return next(self._first_simulators), next(self._records)

    def release(self) -> None:
        pass


class _RingRecords:
    """As ``_OwnRecords``, from the rings in turn. out_of_order: how many did not have the next sequence
    number of their ring (``ActorStep.version``, which here is that number)."""

    def __init__(self, rings: list[ActorRing], simulators: int) -> None:
        self._rings, self._simulators = rings, simulators
        self._next_ring = self._ring_index = self.taken = self.out_of_order = 0
        self._last_versions = [-1] * len(rings)
        self._pauses = Backoff()

    def next(self) -> tuple[int, ActorStep]:
        while True:
            for _ in self._rings:
                ring_index = self._next_ring % len(self._rings)
                self._next_ring += 1
                if self._rings[ring_index].waiting_records:
                    self._pauses.reset()
                    return ring_index * self._simulators, self._oldest(ring_index)
            self._pauses.sleep()

    def release(self) -> None:
        self._rings[self._ring_index].drop()

    def drain(self) -> None:
        for ring_index, ring in enumerate(self._rings):
            while ring.waiting_records:
                self._oldest(ring_index)
                self.release()

    def _oldest(self, ring_index: int) -> ActorStep:
        record, self._ring_index = self._rings[ring_index].oldest(), ring_index
        self.taken += 1
        self.out_of_order += record.version != self._last_versions[ring_index] + 1
        self._last_versions[ring_index] = record.version
        return record


def _act(rings: list[ActorRing], stop: Any, plan: SharedReplayPlan) -> int:
    """Fill the rings until all learners stop; returns the number of records put.

    Records are numbered separately in each ring.
    """
    use_batch_scheduling()  # as actors of a run do
    records = [_records(plan) for _ in rings]
    put, pauses = 0, Backoff()
    while not stop.all():
        idle = True
        for ring, record in zip(rings, records, strict=True):
            if ring.has_room:
                ring.put(next(record))
                put, idle = put + 1, False
        if idle:
            pauses.sleep()
        else:
            pauses.reset()
    return put


def _learn(feed: _OwnRecords | _RingRecords, plan: SharedReplayPlan) -> dict[str, float]:
    config = ReplayConfig(
        capacity=plan.capacity, learning_starts=plan.filled, samples_per_insert=plan.samples_per_insert
    )
    simulators = plan.actors * plan.simulators
    replay = open_replay(config, _SPEC, simulators=simulators, steps=1, discount=0.99, seed=0)
    sampler = ReplaySampler(replay, config, plan.batch, torch.device("cpu"), lambda: 0.0)
    errors = torch.rand(_RECORDS, plan.batch, generator=torch.Generator().manual_seed(1))

    def insert_and_draw(number: int) -> None:
        while not sampler.due:
            sampler.before_steps()
            first_simulator, record = feed.next()
            sampler.insert(first_simulator, record.steps)
            feed.release()
        batch: Batch = sampler.next(0, [])
        batch.feedback(errors[number % _RECORDS])

    for number in range(50):
        insert_and_draw(number)
    began, cpu_start = time.monotonic(), time.process_time()
    inserted_before, draws = replay.inserted, 0
    while time.monotonic() < began + plan.seconds:
        insert_and_draw(draws)
        draws += 1
    wall, cpu = time.monotonic() - began, time.process_time() - cpu_start
    sampler.close()
    return {
        "draws": float(draws * plan.batch),
        "inserts": float(replay.inserted - inserted_before),
        "wall_seconds": wall,
        "cpu_seconds": cpu,
    }
