"""Replay that four actor processes fill through shared memory, against a learner that fills its own."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from murmurate.bench import _roles
from murmurate.bench._result import Log, median, ratios, spreads
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Steps
from murmurate.sources.replay_sampler import ReplaySampler
from murmurate.sources.shared_ring import ActorRing, ActorStep, Backoff, use_batch_scheduling
from murmurate.spec import Batch, EnvSpec

NAME = "replay-shared"
SUMMARY = (
    "draws per CPU second of learners that four actors feed through shared memory, and of a single process"
)

_SPEC = EnvSpec("rows", (17,), torch.float32, actions=0, action_shape=(6,))
_RECORDS = 64  # made beforehand and sent in turn, so that only the replay is measured


class RecordFeed(Protocol):
    """The source of a learner's records."""

    def next(self) -> tuple[int, ActorStep]:
        """(number of its first simulator, record); valid until ``done``."""
        ...

    def done(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class SharedReplayPlan:
    """Learners draw batches of ``batch`` from ``capacity`` rows, each row ``samples_per_insert`` times; each
    of the ``actors`` has ``simulators``."""

    seconds: float = 5.0
    repetitions: int = 3
    learners: tuple[int, ...] = (1, 2)
    actors: int = 4
    simulators: int = 16
    capacity: int = 2**20
    filled: int = 2**16
    batch: int = 256
    samples_per_insert: float = 8.0


QUICK, FULL = SharedReplayPlan(), SharedReplayPlan(seconds=60.0, repetitions=1)


def measure(plan: SharedReplayPlan, log: Log) -> dict[str, Any]:
    """Each learner alone writes its bank; actors fill rings, and a full ring stops its actor.

    The cases "apart" are processes that each fill their own replay and share nothing: what they lose is due
    to the caches and the memory bandwidth that cores share.
    """
    cases = {"alone": (1, 0)} | {f"{n} apart": (n, 0) for n in plan.learners if n > 1}
    cases |= {f"{n} learner{'s' * (n > 1)}": (n, plan.actors) for n in plan.learners}
    rows: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(plan.repetitions):
        for case, (learners, actors) in cases.items():
            log(f"{case}, {number + 1} of {plan.repetitions}")
            answers = _roles.together(learners + actors, work, learners if actors else 0, plan)
            rows[case].append(_totals(answers, learners))
    alone = [row["draws_per_cpu_second"] for row in rows["alone"]]
    return {
        "cases": {case: spreads(of) for case, of in rows.items()},
        "share_of_alone": {
            case: median(ratios([row["draws_per_cpu_second"] for row in of], alone))
            for case, of in rows.items()
            if case != "alone"
        },
        "lost_records": sum(row["lost_records"] for of in rows.values() for row in of),
    }


def _totals(answers: list[dict[str, float]], learners: int) -> dict[str, float]:
    own = answers[:learners]
    put, taken = (sum(a[key] for a in answers) for key in ("put", "taken"))
    return {
        "draws_per_cpu_second": sum(a["draws"] for a in own) / sum(a["cpu_seconds"] for a in own),
        "draws_per_second": sum(a["draws"] / a["wall_seconds"] for a in own),
        "inserts_per_second": sum(a["inserts"] / a["wall_seconds"] for a in own),
        "lost_records": abs(put - taken) + sum(a["astray"] for a in answers),
    }


def work(fabric: ProcessFabric, learners: int, plan: SharedReplayPlan) -> dict[str, float]:
    """What one member measures. Learners are the first members; each actor feeds all of them in turn."""
    if not learners:
        return _learn(_OwnRecords(plan), plan)
    lanes = list(itertools.product(range(learners), range(plan.actors)))
    rings = {lane: ActorRing(fabric.memory_file, _SPEC, plan.simulators) for lane in lanes}
    stop, ended = (
        fabric.memory_file.counters("stop", (learners,)),
        fabric.memory_file.counters("ended", (plan.actors,)),
    )
    if fabric.rank >= learners:
        actor = fabric.rank - learners
        put = _act([rings[learner, actor] for learner in range(learners)], stop, plan)
        ended[actor] = 1
        return {"put": put, "taken": 0, "astray": 0}
    mine = [rings[fabric.rank, actor] for actor in range(plan.actors)]
    feed = _RingRecords(mine, plan.simulators)
    try:
        figures = _learn(feed, plan)
    finally:
        stop[fabric.rank] = 1
    over, pauses = False, Backoff()
    while not over:  # actors go on until all learners have stopped
        over = bool(ended.all())
        feed.drain()
        pauses.sleep()
    return figures | {"taken": feed.taken, "astray": feed.astray}


def _records(plan: SharedReplayPlan) -> Iterator[ActorStep]:
    """An endless stream of numbered records of one episode."""
    generator = torch.Generator().manual_seed(0)
    no = torch.zeros(plan.simulators, dtype=torch.bool)
    steps = []
    for _ in range(_RECORDS):
        seen = torch.randn(2, plan.simulators, *_SPEC.observation_shape, generator=generator)
        action = torch.randn(plan.simulators, *_SPEC.action_shape, generator=generator)
        reward, taken, following = torch.randn(3, plan.simulators, generator=generator)
        steps.append(Steps(seen[0], action, reward, seen[1], no, no, taken, following))
    for number in itertools.count():
        yield ActorStep(steps[number % _RECORDS], [], number)


class _OwnRecords:
    """Records made by the learner itself."""

    def __init__(self, plan: SharedReplayPlan) -> None:
        self._records = _records(plan)
        self._lows = itertools.cycle(range(0, plan.actors * plan.simulators, plan.simulators))

    def next(self) -> tuple[int, ActorStep]:
        return next(self._lows), next(self._records)

    def done(self) -> None:
        pass


class _RingRecords:
    """Records from the rings in turn. astray: how many were out of order in their ring."""

    def __init__(self, rings: list[ActorRing], simulators: int) -> None:
        self._rings, self._simulators = rings, simulators
        self._turn = self._which = self.taken = self.astray = 0
        self._seen = [-1] * len(rings)
        self._pauses = Backoff()

    def next(self) -> tuple[int, ActorStep]:
        while True:
            for _ in self._rings:
                which = self._turn % len(self._rings)
                self._turn += 1
                if self._rings[which].waiting:
                    self._pauses.reset()
                    return which * self._simulators, self._oldest(which)
            self._pauses.sleep()

    def done(self) -> None:
        self._rings[self._which].drop()

    def drain(self) -> None:
        for which, ring in enumerate(self._rings):
            while ring.waiting:
                self._oldest(which)
                self.done()

    def _oldest(self, which: int) -> ActorStep:
        record, self._which = self._rings[which].oldest(), which
        self.taken += 1
        self.astray += record.version != self._seen[which] + 1
        self._seen[which] = record.version
        return record


def _act(rings: list[ActorRing], stop: Any, plan: SharedReplayPlan) -> int:
    """Fill the rings until all learners stop; the number of records put. Each ring numbers its own."""
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


def _learn(feed: RecordFeed, plan: SharedReplayPlan) -> dict[str, float]:
    config = ReplayConfig(
        capacity=plan.capacity, learning_starts=plan.filled, samples_per_insert=plan.samples_per_insert
    )
    simulators = plan.actors * plan.simulators
    replay = open_replay(config, _SPEC, simulators=simulators, steps=1, discount=0.99, seed=0)
    sampler = ReplaySampler(replay, config, plan.batch, torch.device("cpu"), lambda: 0.0)
    errors = torch.rand(_RECORDS, plan.batch, generator=torch.Generator().manual_seed(1))

    def turn(number: int) -> None:
        while not sampler.due:
            sampler.before_steps()
            low, record = feed.next()
            sampler.insert(low, record.steps)
            feed.done()
        batch: Batch = sampler.next(0, [])
        batch.feedback(errors[number % _RECORDS])

    for number in range(50):
        turn(number)
    began, cpu, inserted, draws = time.monotonic(), time.process_time(), replay.inserted, 0
    while time.monotonic() < began + plan.seconds:
        turn(draws)
        draws += 1
    wall, cpu = time.monotonic() - began, time.process_time() - cpu
    sampler.close()
    return {
        "draws": float(draws * plan.batch),
        "inserts": float(replay.inserted - inserted),
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "put": 0,
        "taken": 0,
        "astray": 0,
    }
