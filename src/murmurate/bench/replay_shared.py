"""A learner that is fed by four actors in processes of their own, beside one that feeds itself."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from murmurate.bench import _roles
from murmurate.bench._result import Log, median, spread
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Steps
from murmurate.sources.replay_sampler import ReplaySampler
from murmurate.sources.shared_ring import ActorRing, ActorStep, Backoff, use_batch_scheduling
from murmurate.spec import Batch, EnvSpec

NAME = "replay-shared"
SUMMARY = (
    "draws per CPU second of learners that four actors feed through shared memory, beside a single process"
)

_SPEC = EnvSpec("rows", (17,), torch.float32, actions=0, action_shape=(6,))
_RECORDS = 64  # that are made beforehand and sent in turn, so that it is the replay that is measured


class Feed(Protocol):
    """Where a learner's records come from."""

    def next(self) -> tuple[int, ActorStep]:
        """With the number of its first simulator; valid until ``done``."""
        ...

    def done(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """Learners draw batches of ``batch`` from ``capacity`` rows, ``samples_per_insert`` of each row; each of
    ``actors`` plays ``simulators``."""

    seconds: float = 5.0
    repetitions: int = 3
    learners: tuple[int, ...] = (1, 2)
    actors: int = 4
    simulators: int = 16
    capacity: int = 2**20
    filled: int = 2**16
    batch: int = 256
    samples_per_insert: float = 8.0


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """Each learner owns a bank and writes it alone; actors fill rings, and a full ring stops its actor.

    Beside them, processes that each feed themselves and share nothing: what busy neighbours cost by
    themselves, through the caches and the memory that cores share.
    """
    plan = plan or (Plan(seconds=60.0, repetitions=1) if full else Plan())
    cases = {"alone": (1, 0)} | {f"{n} apart": (n, 0) for n in plan.learners if n > 1}
    cases |= {f"{n} learner{'s' * (n > 1)}": (n, plan.actors) for n in plan.learners}
    rows: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(plan.repetitions):
        for case, (learners, actors) in cases.items():
            log(f"{case}, {number + 1} of {plan.repetitions}")
            answers = _roles.together(learners + actors, work, learners if actors else 0, plan)
            rows[case].append(_sum_up(answers, learners))
    alone = [row["draws_per_cpu_second"] for row in rows["alone"]]
    return {
        "cases": {
            case: {key: spread([row[key] for row in of]) for key in of[0]} for case, of in rows.items()
        },
        "share_of_alone": {
            case: median([row["draws_per_cpu_second"] / a for row, a in zip(of, alone, strict=True)])
            for case, of in rows.items()
            if case != "alone"
        },
        "lost_records": sum(row["lost_records"] for of in rows.values() for row in of),
        "plan": dataclasses.asdict(plan),
    }


def _sum_up(answers: list[dict[str, float]], learners: int) -> dict[str, float]:
    own = answers[:learners]
    put, taken = (sum(a[key] for a in answers) for key in ("put", "taken"))
    return {
        "draws_per_cpu_second": sum(a["draws"] for a in own) / sum(a["cpu_seconds"] for a in own),
        "draws_per_second": sum(a["draws"] / a["wall_seconds"] for a in own),
        "inserts_per_second": sum(a["inserts"] / a["wall_seconds"] for a in own),
        "lost_records": abs(put - taken) + sum(a["astray"] for a in answers),
    }


def work(fabric: ProcessFabric, learners: int, plan: Plan) -> dict[str, float]:
    """Learners are the first members; each actor feeds all of them in turn."""
    if not learners:
        return _learn(_Own(plan), plan)
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
    feed = _Rings(mine, plan.simulators)
    try:
        found = _learn(feed, plan)
    finally:
        stop[fabric.rank] = 1
    over, pauses = False, Backoff()
    while not over:  # the others' actors are ours, and put on
        over = bool(ended.all())
        feed.drain()
        pauses.sleep()
    return found | {"taken": feed.taken, "astray": feed.astray}


def _records(plan: Plan) -> Iterator[ActorStep]:
    """Without end, each numbered one higher; no episode ever ends."""
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


class _Own:
    """Records made here."""

    def __init__(self, plan: Plan) -> None:
        self._records = _records(plan)
        self._lows = itertools.cycle(range(0, plan.actors * plan.simulators, plan.simulators))

    def next(self) -> tuple[int, ActorStep]:
        return next(self._lows), next(self._records)

    def done(self) -> None:
        pass


class _Rings:
    """From the next ring in turn that has something. astray: records that were not the next of their ring."""

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
                    return which * self._simulators, self._look(which)
            self._pauses.sleep()

    def done(self) -> None:
        self._rings[self._which].drop()

    def drain(self) -> None:
        for which, ring in enumerate(self._rings):
            while ring.waiting:
                self._look(which)
                self.done()

    def _look(self, which: int) -> ActorStep:
        record, self._which = self._rings[which].oldest(), which
        self.taken += 1
        self.astray += record.version != self._seen[which] + 1
        self._seen[which] = record.version
        return record


def _act(rings: list[ActorRing], stop: Any, plan: Plan) -> int:
    """Fill the rings, each with records numbered on its own; how many there were."""
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


def _learn(feed: Feed, plan: Plan) -> dict[str, float]:
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
