"""Learners draw from one replay service while actors and samplers are killed; then what the service stored
and what the learners drew is counted."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from typing import Any, cast

import numpy as np
import psutil
import torch

from murmurate.bench._numbered import NumberedLearner, NumberedWorld
from murmurate.errors import RunFailed
from murmurate.evaluation.games import Games
from murmurate.fabric.interface import Channel, Fabric
from murmurate.ranges import NonNegativeInt, PositiveFloat, PositiveInt, PositiveSeconds
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.sources.replay_service import ReplayServiceSourceConfig
from murmurate.sources.service_source import ServiceSource
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.members import open_source
from murmurate.training.run import Run

_START_DEADLINE_SECONDS = 240.0


@dataclasses.dataclass(frozen=True)
class ServicePlan:
    """learners: number of learners that share the service. actors: number of actors of all learners together.
    samplers: number of samplers of all learners together. shards: number of shards of all learners together.
    simulators: number of simulators of each actor. seconds: duration of the measurement without kills. kills:
    number of actors, and of samplers, that each learner kills. kill_draws: number of batches drawn between
    two kills. capacity: rows of all shards; all that is inserted must fit, or it cannot be counted. filled:
    rows before the first draw. batch: rows of a draw. samples_per_insert: how often each row is drawn. slack:
    rows by which learners may be ahead or behind."""

    learners: PositiveInt = 2
    actors: PositiveInt = 4
    samplers: PositiveInt = 4
    shards: PositiveInt = 2
    simulators: PositiveInt = 16
    seconds: PositiveSeconds = 5.0
    kills: NonNegativeInt = 3
    kill_draws: PositiveInt = 200
    capacity: PositiveInt = 2**21
    filled: PositiveInt = 2**14
    batch: PositiveInt = 256
    samples_per_insert: PositiveFloat = 8.0
    slack: NonNegativeInt = 0


def service_run(plan: ServicePlan) -> Run:
    learners = plan.learners
    replay = ReplayConfig(
        capacity=plan.capacity // learners,
        learning_starts=plan.filled // learners,
        samples_per_insert=plan.samples_per_insert,
    )
    source = ReplayServiceSourceConfig(
        simulators=plan.simulators * plan.actors // learners,
        actors=plan.actors // learners,
        shards=plan.shards // learners,
        samplers=plan.samplers // learners,
        slack=plan.slack,
        replay=replay,
    )
    return Run(
        recipe="numbered",
        world=NumberedWorld(),
        learner=NumberedLearner(plan.batch),
        strategy=AllReduce(),
        source=source,
        evaluation=Games(),
        replicas=learners,
        env_steps=1_000_000_000,
    )


def serve_and_count(fabric: Fabric, plan: ServicePlan) -> dict[str, float]:
    """What one learner measures, with the counts of its own shards and its own draws."""
    run = service_run(plan)
    learner = run.learner.build(Context(run.world.spec(), Replica, 0, rank=fabric.rank))
    source = cast(ServiceSource, open_source(run, fabric.rank, learner, fabric))
    barrier = fabric.channel("barrier", torch.zeros(1, dtype=torch.float64))
    loop = _LearnerLoop(source, learner, barrier)
    try:
        loop.draw_until_started()
        figures = loop.draw_for(plan.seconds)
        loop.draw_under_kills(plan)
        return figures | loop.counts(run)
    finally:
        source.close()


class _LearnerLoop:
    """Draws and learns; ``batches`` and ``kills`` count what has been drawn and killed so far."""

    def __init__(self, source: ServiceSource, learner: Any, barrier: Channel) -> None:
        self.source, self.learner, self.barrier = source, learner, barrier
        self.batches = 0
        self.kills = 0
        source.alive = lambda played: False

    def next(self) -> None:
        batch = next(self.source)
        batch.feedback(self.learner.learn(batch).priorities)
        self.batches += 1

    def wait_for_all(self) -> None:
        self.barrier.gather(torch.zeros(1, dtype=torch.float64))

    def draw_until_started(self) -> None:
        """Draw until the actors have begun and all processes have warmed up."""
        deadline = time.monotonic() + _START_DEADLINE_SECONDS
        while self.batches < 50 or self.source.sent_records < 4 * len(self.source.pids["actors"]):
            self.next()
            if time.monotonic() > deadline:
                raise RunFailed(f"the actors did not begin within {_START_DEADLINE_SECONDS:g} s")
        self.wait_for_all()

    def draw_for(self, seconds: float) -> dict[str, float]:
        before, cpu_before = self._cpu_seconds(), time.process_time()
        end, batches_before = time.monotonic() + seconds, self.batches
        while time.monotonic() < end:
            self.next()
        cpu, after = time.process_time() - cpu_before, self._cpu_seconds()
        cpu_by_kind = {f"cpu_seconds_{kind}": after[kind] - before[kind] for kind in after}
        self.wait_for_all()
        draws = float((self.batches - batches_before) * self.learner.batch)
        return {"draws": draws, "cpu_seconds_learner": cpu, **cpu_by_kind}

    def _cpu_seconds(self) -> dict[str, float]:
        """CPU seconds so far of the processes of each kind."""

        def seconds(pid: int) -> float:
            times = psutil.Process(pid).cpu_times()
            return float(times.user + times.system)

        return {kind: sum(seconds(pid) for pid in pids) for kind, pids in self.source.pids.items()}

    def draw_under_kills(self, plan: ServicePlan) -> None:
        generator = np.random.default_rng(self.barrier.rank)
        for kind in ["actors", "samplers"] * plan.kills:
            victims, deaths = self.source.pids[kind], self._deaths()
            os.kill(victims[generator.integers(len(victims))], signal.SIGKILL)
            self.kills += 1
            for _ in range(plan.kill_draws):
                self.next()
            while self._deaths() == deaths:  # until the killed process has been started again
                self.next()

    def _deaths(self) -> int:
        fields = self.source.fields()
        return int(fields["actor_deaths"] + fields["sampler_deaths"])

    def counts(self, run: Run) -> dict[str, float]:
        """What was stored and drawn. Waits until all learners have stopped drawing, so that this
        learner's shards no longer change."""
        self.wait_for_all()
        self.source.hold()
        state = self.source.state()
        self.wait_for_all()
        source, config = self.source, cast(ReplayServiceSourceConfig, run.source)
        steps = _stored(run, state)
        stored_steps: dict[tuple[float, float], list[float]] = {}
        for simulator, process, step in steps.tolist():
            stored_steps.setdefault((simulator, process), []).append(step)
        inserted = sum(shard["inserted"] for shard in state["shards"])
        figures = {
            "acknowledged": float(source.acknowledged),
            "inserted": float(inserted),
            "stored": float(len(steps)),
            # the steps of a process are 0, 1, ...: a gap is a lost insert, a repetition a doubled one
            "lost_inserts": float(sum(max(n) + 1 - len(set(n)) for n in stored_steps.values())),
            "doubled_inserts": float(sum(len(n) - len(set(n)) for n in stored_steps.values())),
            "drawn": float(sum(shard["drawn"] for shard in state["shards"])),
            "handed": float(self.batches * self.learner.batch),
            "waiting_draws": float(source.waiting_draws),
            "starts": float(config.replay.learning_starts),
            "kills": float(self.kills),
            "actor_deaths": float(source.fields()["actor_deaths"]),
            "sampler_deaths": float(source.fields()["sampler_deaths"]),
        }
        self.wait_for_all()
        return figures


def _stored(run: Run, state: dict[str, Any]) -> Any:
    """[n, 3]: simulator, process and number of each step that this learner's shards hold. Raises RunFailed if
    more were inserted than they hold: the overwritten ones would count as lost."""
    source = cast(ReplayServiceSourceConfig, run.source)
    steps: list[Any] = []
    for number in itertools.count():
        saved = state["replays"].get(f"shard{number}")
        if saved is None:
            return np.concatenate(steps)
        config = dataclasses.replace(source.replay, capacity=source.replay.capacity // source.shards)
        filled = saved["store"]["head"]
        if filled > config.capacity:
            raise RunFailed(
                f"shard {number} was given {filled:,} rows and holds {config.capacity:,}: what was "
                "overwritten cannot be counted. Use a larger --capacity, or fewer --seconds."
            )
        actors = len(state["first"])
        replay = open_replay(config, run.world.spec(), simulators=actors, steps=1, discount=0.99, seed=0)
        rows = cast(Any, replay).rows
        rows.load(saved["store"]["rows"])
        steps.append(rows.column("observation")[:filled, :3].numpy().copy())
