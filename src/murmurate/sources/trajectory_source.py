"""Trajectories of actor processes, which act with a policy that is a little old (Espeholt et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from murmurate.agents.interface import Agent
from murmurate.errors import Refusal
from murmurate.fabric.processes.memory_limits import PROCESS_BYTES
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.sources.actor_processes import ActorPlan, ActorProcess, ActorProcesses
from murmurate.sources.interface import BatchShape, RunView, Source, SourceConfig, SourceContext
from murmurate.sources.joined_trajectories import JoinedTrajectories
from murmurate.sources.polling import Backoff
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.sources.simulator_groups import check_loaded_simulators, check_saved_simulators
from murmurate.sources.trajectory_ring import QueuedTrajectory, TrajectoryRing, TrajectoryShape
from murmurate.spec import Batch, Episode, derive_generator, derive_seed
from murmurate.worlds.interface import SimulatorWorld

_POLLS = 50  # polls of the rings between two calls of ``alive``


@dataclass(frozen=True)
class TrajectorySourceConfig(SourceConfig):
    """Trajectories that actor processes make while the learner learns.

    simulators: number of simulators of each learner. actors: number of actor processes of each learner, with
        equal shares of its simulators. With 0 the learner acts itself, as in rollouts.
    trajectories: number of trajectories in a batch, which takes the first that come from any actor; its T x B
        steps have B = ``trajectories * simulators / actors``. 0 means as many as there are actors.
    queue: how many trajectories of each actor may wait for the learner; the actor waits when there are so
        many.
    max_lag: how many batches at most the learner may have learned from since it published the policy that
        made a trajectory. An older trajectory is dropped and counted.
    """

    simulators: PositiveInt = 32
    actors: NonNegativeInt = 0
    trajectories: NonNegativeInt = 0
    queue: PositiveInt = 1
    max_lag: PositiveInt = 10

    gives: ClassVar[str] = "rollouts"

    @property
    def batch(self) -> int:
        """Number of trajectories in a batch."""
        return self.trajectories or self.actors

    @property
    def columns(self) -> int:
        """B, the number of columns of a batch [T, B]."""
        return self.batch * self.simulators // self.actors if self.actors else self.simulators

    def check(self, run: RunView) -> None:
        if self.actors and self.simulators % self.actors:
            per_actor = max(1, round(self.simulators / self.actors))
            raise Refusal(
                f"{self.actors} actors have equal shares of the simulators, and {self.simulators} cannot be "
                f"divided. Use --simulators {per_actor * self.actors}."
            )
        if not self.actors:
            return self._as_rollouts.check(run)
        needed = math.ceil(run.learner.requires.simulators * self.actors / self.simulators)
        if self.batch < needed:
            raise Refusal(
                f"{run.learner.name} divides a batch of {self.columns} simulators into more minibatches than "
                f"it has simulators. Use --trajectories {needed}, or fewer minibatches."
            )
        RolloutSourceConfig(self.columns).check(run)
        if getattr(run.learner, "scale_rewards", False):
            raise Refusal(
                "scale_rewards follows the return of each simulator, and trajectories of actors come in any "
                "order. Use --actors 0, or --agent.scale-rewards false."
            )
        longest_wait = math.ceil(self.actors * self.queue / self.batch)  # in batches
        if self.max_lag < longest_wait:
            shorter = "a smaller --queue" if self.queue > 1 else "more --trajectories"
            raise Refusal(
                f"max_lag is {self.max_lag}, and trajectories wait for up to {longest_wait} batches. "
                f"Use --max-lag {longest_wait}, or {shorter}."
            )

    def acting_processes(self) -> int:
        return self.actors

    def batch_shape(self, run: RunView) -> BatchShape:
        rows: int = self.columns * run.learner.requires.steps
        return BatchShape(self.simulators, self.actors or 1, rows / self.simulators, rows)

    def cost_settings(self) -> dict[str, Any]:
        return {}

    @property
    def _as_rollouts(self) -> RolloutSourceConfig:
        return RolloutSourceConfig(self.simulators)

    def batches(self, run: RunView) -> int | None:
        if run.env_steps is None:
            return None
        steps: int = run.learner.requires.steps
        return max(1, run.env_steps // (run.replicas * self.columns * steps))

    def memory_bytes(self, run: RunView) -> int:
        if not self.actors:
            return self._as_rollouts.memory_bytes(run)
        requires = run.learner.requires
        size = self.simulators // self.actors
        shape = TrajectoryShape(run.world.spec(), requires.steps, size, 0, requires.behaviour)
        trajectories = self.actors * self.queue + 2 * self.batch
        actor_bytes = self.actors * PROCESS_BYTES + self._as_rollouts.memory_bytes(run)
        return actor_bytes + trajectories * shape.slot_bytes

    def check_state(self, state: dict[str, Any]) -> None:
        check_saved_simulators(state, self.simulators)

    def open(self, context: SourceContext) -> Source:
        if not self.actors:
            return self._as_rollouts.open(context)
        return TrajectorySource(self, context)


class TrajectorySource:
    """Yields ``Batch(data=Trajectory, ...)`` without end (a ``Source``); its env steps include those of
    dropped trajectories. A batch is valid until the one after next is requested.

    The policy is published before each batch, and an actor fetches it before each trajectory. An actor that
    dies or hangs is started again, with new random seeds, and reported by ``events``; meanwhile batches
    consist of the other actors' trajectories.
    """

    exact = False  # the state of actors is not saved

    def __init__(self, config: TrajectorySourceConfig, context: SourceContext) -> None:
        run, learner, rank = context.run, cast(Agent, context.learner), context.rank
        self.config = config
        self.alive: Callable[[int], bool] = lambda played: False
        self._seed = derive_seed(run.seed, "source", rank)
        plan = ActorPlan(
            cast(SimulatorWorld, run.world),
            run.learner,
            config.actors,
            config.simulators,
            rank=rank,
            replicas=run.replicas,
            queue=config.queue,
        )
        learner.assign_simulators(rank * config.simulators, run.replicas * config.simulators)
        memory, requires = learner.initial_memory(1), run.learner.requires
        self._shape = shape = TrajectoryShape(
            run.world.spec(),
            requires.steps,
            config.simulators // config.actors,
            0 if memory is None else memory.shape[1],
            requires.behaviour,
        )
        self._processes = ActorProcesses(
            plan,
            learner,
            "murmurate.sources.trajectory_actor",
            lambda memory_file, _: TrajectoryRing(memory_file, shape, config.queue),
            seed=self._seed,
        )
        self._joined = [JoinedTrajectories(shape, config.batch, context.device) for _ in range(2)]
        self._batches = self._dropped = self._lag_max = 0
        self._lags: list[int] = []  # of the trajectories used since the last call of ``fields``
        self._empty_seconds = 0.0
        self._backoff = Backoff()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        # publishing also waits until the GPU has copied the pinned memory that is written next
        self._processes.publish(self._batches + 1)
        self._processes.start(self._batches)
        joined, count = self._joined[self._batches % 2], 0
        played, episodes = 0, list[Episode]()
        while count < self.config.batch:
            actor = self._next_actor()
            if self.alive(played):
                return Batch(None, played, episodes)
            if actor is None:
                continue
            queued = actor.ring.oldest()
            played += self._shape.steps * self._shape.size
            episodes += [episode.numbered_from(actor.first_simulator) for episode in queued.episodes]
            if self._is_fresh(queued):
                joined.put(count, queued.data)
                count += 1
            actor.ring.drop()
        self._batches += 1
        return Batch(joined.trajectory(), played, episodes)

    def _next_actor(self) -> ActorProcess[TrajectoryRing] | None:
        """The next actor with a trajectory; None if no trajectory came within a short wait."""
        for _ in range(_POLLS):
            self._processes.check(self._batches)
            if (actor := self._processes.next_waiting()) is not None:
                self._backoff.reset()
                return actor
            self._empty_seconds += self._backoff.sleep()
        return None

    def _is_fresh(self, queued: QueuedTrajectory) -> bool:
        """Whether the trajectory is within ``max_lag``; counts it as used or dropped."""
        lag = self._batches + 1 - queued.version
        if lag > self.config.max_lag:
            self._dropped += 1
            return False
        self._lags.append(lag)
        self._lag_max = max(self._lag_max, lag)
        return True

    def fields(self) -> dict[str, Any]:
        lags, self._lags = self._lags, []
        restarts = sum(actor.ring.restarts for actor in self._processes.actors)
        return {
            "policy_lag_mean": sum(lags) / len(lags) if lags else None,
            "policy_lag_max": self._lag_max,
            "trajectories_dropped": self._dropped,
            "queue_full_seconds": sum(actor.ring.full_seconds for actor in self._processes.actors),
            "queue_empty_seconds": self._empty_seconds,
            "actor_deaths": self._processes.deaths,
            **({"simulator_restarts": restarts} if restarts else {}),
        }

    def events(self) -> Sequence[tuple[str, str]]:
        return self._processes.taken_events()

    def state(self) -> dict[str, Any]:
        """Call it between two batches only. Unfinished episodes and waiting trajectories are lost."""
        generator = derive_generator(self._seed, f"actions after batch {self._batches}")
        return {
            "batches": self._batches,
            "groups": [None],  # this and below: what a ``RolloutSource`` needs to load the state
            "generator": generator.get_state(),
            "first": torch.ones(self.config.simulators, dtype=torch.bool),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; actors begin new episodes, with new seeds."""
        check_loaded_simulators(state, self.config.simulators)
        self._batches = int(state["batches"])

    def fresh_start(self, batches: int) -> None:
        """Begin in the middle of a run; to be called before the actors have started."""
        self._batches = batches

    def close(self) -> None:
        self._processes.close()
