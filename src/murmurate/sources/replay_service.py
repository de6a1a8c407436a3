"""Batches from a replay service, whose shards the actors of all learners fill (decision 0033)."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from murmurate.agents.interface import Agent
from murmurate.errors import Refusal
from murmurate.fabric.processes.memory_limits import PROCESS_BYTES
from murmurate.ranges import NonNegativeInt, PositiveInt, Range
from murmurate.replay.config import ReplayConfig, memory_bytes, replay_bytes
from murmurate.replay.memory import refuse_full_disk
from murmurate.replay.rate_limiter import least_slack
from murmurate.sources.actor_processes import ActorPlan
from murmurate.sources.interface import RunView, Source, SourceConfig, SourceContext
from murmurate.sources.replay_source import ReplaySourceConfig
from murmurate.sources.service_control import batch_fields
from murmurate.sources.service_links import ShardAddress, new_socket_name
from murmurate.sources.service_processes import shard_config
from murmurate.sources.service_shard import ShardSettings
from murmurate.sources.service_slots import SlotLayout
from murmurate.sources.service_source import ServiceSource
from murmurate.sources.simulator_groups import SIMULATOR_BYTES, check_saved_simulators, step_bytes
from murmurate.spec import Transitions, derive_seed
from murmurate.worlds.interface import SimulatorWorld

SLOTS = 2  # of a sampler, one block each: one that the learner uses or will use, one that is being drawn
_SAMPLER_BYTES = 30 * 2**20
_POLL_SECONDS = 5e-3  # the longest time between two polls of an actor whose ring is full


@dataclass(frozen=True)
class ReplayServiceSourceConfig(SourceConfig):
    """Batches of transitions from the shards of all learners, which actor processes fill.

    simulators: number of simulators of each learner.
    actors: number of actor processes of each learner, which share its simulators; with 0 there is no service,
        and the learner acts itself and has a replay of its own.
    shards: number of shard processes of each learner, each with an equal part of the learner's replay and of
        its actors.
    samplers: number of sampler processes of each learner. Each keeps two blocks of batches ready; a batch has
        an equal part from each shard of all learners.
    block: number of batches that are drawn at once. With a larger block processes wait for one another less
        often, but batches are drawn by older priorities.
    slack: env steps by which a shard's actors may be ahead of ``samples_per_insert``; 0 means twice the least
        slack with which draws and inserts cannot block each other. With more slack actors and learners
        alternate less often, and samples per insert may deviate more.
    replay: size, sampling and storage of each learner's replay.
    random_env_steps: env steps of each learner, at its start, whose actions are uniformly random.
    """

    simulators: PositiveInt = 16
    actors: NonNegativeInt = 4
    shards: PositiveInt = 1
    samplers: PositiveInt = 2
    block: Annotated[int, Range(1, 32)] = 4
    slack: NonNegativeInt = 0
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    random_env_steps: NonNegativeInt = 0

    gives: ClassVar[str] = "transitions"

    @property
    def _as_replay(self) -> ReplaySourceConfig:
        return ReplaySourceConfig(
            simulators=self.simulators,
            replay=self.replay,
            actors=self.actors,
            random_env_steps=self.random_env_steps,
        )

    def check(self, run: RunView) -> None:
        self._as_replay.check(run)
        if not self.actors:
            return
        if not hasattr(os, "eventfd"):
            raise Refusal("a replay service needs Linux. Use --actors 0.")
        if self.shards > self.actors:
            raise Refusal(
                f"{self.shards} shards are filled by {self.actors} actors, and each needs one. Use --shards "
                f"{self.actors}, or more actors."
            )
        all_shards, batch = run.replicas * self.shards, run.learner.requires.batch
        if all_shards > batch:
            raise Refusal(
                f"a batch of {batch} has a part from each of {all_shards} shards. Use fewer --shards, or a "
                "larger --agent.batch."
            )
        if all_shards > 1 and self.replay.segments > 1 and self.replay.segment_draws == "one":
            raise Refusal(
                f"replay.segment_draws is one, but a batch has a part from each of {all_shards} shards, "
                "whose segments have priorities of their own. Use --replay.segment-draws each."
            )
        self._check_replay(math.ceil(batch / all_shards))
        least = self._least_slack(run)
        if self.slack and self.slack < least:
            raise Refusal(
                f"slack is {self.slack}: draws and inserts would wait for one another for ever. Use --slack "
                f"{2 * least}, or 0."
            )

    def acting_processes(self) -> int:
        return self.actors

    def _check_replay(self, part: int) -> None:
        """part: rows of a batch that come from one shard."""
        replay = self.replay
        for name, default, why in (
            ("fit_every", 0, "actors never wait for a fit"),
            ("images", "host", "shards use no GPU"),
            ("ahead", 0, "samplers draw ahead: use --samplers"),
            ("weights", "own", "weights are always those of all shards together"),
        ):
            if getattr(replay, name) != default:
                option = name.replace("_", "-")
                raise Refusal(
                    f"replay.{name} is {getattr(replay, name)}, and in a replay service {why}. Leave out "
                    f"--replay.{option}."
                )
        if replay.folder and replay.saved:
            raise Refusal(
                "replay.folder keeps a shard on a disk, and its learner would need memory for the whole "
                "shard to save it. Use --replay.saved false, or leave out --replay.folder."
            )
        if replay.capacity % self.shards:
            raise Refusal(
                f"replay.capacity is {replay.capacity} and does not divide into {self.shards} shards. Use "
                f"--replay.capacity {replay.capacity - replay.capacity % self.shards}."
            )
        shard_config(replay, self.shards, 0).validate(part)

    def batches(self, run: RunView) -> int | None:
        return self._as_replay.batches(run)

    def _least_slack(self, run: RunView) -> int:
        """The least slack with which a shard never blocks: enough to draw a block, and to insert a batch's
        part into an empty replay."""
        requires: Transitions = run.learner.requires
        part = math.ceil(requires.batch / (run.replicas * self.shards))
        actor_simulators = math.ceil(self.simulators / self.actors)
        shard_simulators = math.ceil(self.simulators / self.shards)
        for_block = least_slack(self.replay.samples_per_insert, self.block * part, actor_simulators)
        return max(math.ceil(for_block), part + requires.n_step * (shard_simulators + actor_simulators))

    def memory_bytes(self, run: RunView) -> int:
        if not self.actors:
            return self._as_replay.memory_bytes(run)
        requires, step = run.learner.requires, step_bytes(run)
        stored = self._store_bytes(run)
        if self.replay.folder:
            refuse_full_disk(Path(self.replay.folder), run.replicas * stored)
        # while a learner saves, it has a copy of its shards' contents
        replays = memory_bytes(self.replay, stored) + self.saved_bytes(run)
        batches = self.samplers * self._layout(run).size_bytes
        pending = self.simulators * (SIMULATOR_BYTES + (requires.n_step + 4) * step)
        processes = (self.actors + self.shards) * PROCESS_BYTES + self.samplers * _SAMPLER_BYTES
        return int(replays + batches + pending + processes)

    def saved_bytes(self, run: RunView) -> int:
        return self._store_bytes(run) if self.replay.saved else 0

    def _store_bytes(self, run: RunView) -> int:
        if not self.actors:
            return self._as_replay.saved_bytes(run)
        requires, total = run.learner.requires, 0
        for index, (start, stop) in enumerate(self._simulators_of_shards()):
            total += replay_bytes(
                shard_config(self.replay, self.shards, index),
                run.world.spec(),
                simulators=stop - start,
                steps=requires.n_step,
                batch=math.ceil(requires.batch / (run.replicas * self.shards)),
                behaviour=requires.behaviour,
            )
        return total

    def check_state(self, state: dict[str, Any]) -> None:
        check_saved_simulators(state, self.simulators)

    def _actors_of_shards(self) -> list[tuple[int, int]]:
        """(first actor, one after the last) of each shard."""
        return [
            (self.actors * k // self.shards, self.actors * (k + 1) // self.shards) for k in range(self.shards)
        ]

    def _simulators_of_shards(self) -> list[tuple[int, int]]:
        def first(actor: int) -> int:
            return self.simulators * actor // self.actors

        return [(first(start), first(stop)) for start, stop in self._actors_of_shards()]

    def _layout(self, run: RunView) -> SlotLayout:
        requires = run.learner.requires
        sizes = {
            name: math.prod(shape) * dtype.itemsize
            for name, (shape, dtype) in batch_fields(run.world.spec(), requires.behaviour).items()
        }
        return SlotLayout(SLOTS, self.block, requires.batch, run.replicas * self.shards, tuple(sizes.items()))

    def open(self, context: SourceContext) -> Source:
        if not self.actors:
            return self._as_replay.open(context)
        run, rank, learner = context.run, context.rank, cast(Agent, context.learner)
        learner.assign_simulators(rank * self.simulators, run.replicas * self.simulators)
        plan = ActorPlan(
            cast(SimulatorWorld, run.world),
            run.learner,
            self.actors,
            self.simulators,
            rank=rank,
            replicas=run.replicas,
            random_env_steps=self.random_env_steps,
            poll_seconds=_POLL_SECONDS,
        )
        shards = [self._shard(context, index) for index in range(self.shards)]
        return ServiceSource(
            plan, context, self.replay, shards, self._actors_of_shards(), self.samplers, self._layout(run)
        )

    def _shard(self, context: SourceContext, index: int) -> ShardSettings:
        run, requires = context.run, context.run.learner.requires
        key = secrets.token_hex(32)
        return ShardSettings(
            address=ShardAddress(context.rank, index, new_socket_name(), context.address, key=key),
            spec=run.world.spec(),
            config=shard_config(self.replay, self.shards, index),
            slack=self.slack or 2 * self._least_slack(run),
            steps=requires.n_step,
            discount=requires.discount,
            behaviour=requires.behaviour,
            seed=derive_seed(run.seed, f"replay shard {index}", context.rank),
            threads=run.placement.threads,
        )


def with_service(source: ReplaySourceConfig, **fields: Any) -> ReplayServiceSourceConfig:
    """``source`` changed to use a replay service, with ``fields``; for recipes."""
    common = {f.name for f in dataclasses.fields(ReplayServiceSourceConfig)} & {
        f.name for f in dataclasses.fields(source)
    }
    return ReplayServiceSourceConfig(**{name: getattr(source, name) for name in common} | fields)
