"""Batches from a replay, which the learner itself or its actors fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from murmurate.agents.interface import Action, Agent, Policy
from murmurate.errors import Refusal
from murmurate.fabric.processes.memory_limits import PROCESS_BYTES
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.replay.config import ReplayConfig, memory_bytes, open_replay, replay_bytes
from murmurate.replay.memory import refuse_full_disk
from murmurate.sources.actor_processes import ActorPlan
from murmurate.sources.actor_source import ActorSource
from murmurate.sources.bank_weights import CHANNEL_LIKE, BankWeights
from murmurate.sources.interface import BatchShape, RunView, Source, SourceConfig, SourceContext
from murmurate.sources.replay_sampler import ReplaySampler, Sampler
from murmurate.sources.simulator_groups import (
    SIMULATOR_BYTES,
    SimulatorGroups,
    check_saved_simulators,
    check_simulators,
    open_groups,
    step_bytes,
)
from murmurate.sources.steps import random_actions, steps_of
from murmurate.spec import Batch, Episode, derive_seed
from murmurate.worlds.interface import Simulators, SimulatorWorld


@dataclass(frozen=True)
class ReplaySourceConfig(SourceConfig):
    """Batches of transitions from a replay, which the learner or its actor processes fill.

    simulators: number of simulators of each learner. double_buffer: act for one half of the simulators while
        the other half steps in native threads or another process; useless where the learner waits
        while they step, as for gymnasium's unless ``served``.
    replay: size, sampling and storage of each learner's replay.
    actors: number of actor processes of each learner; they share its simulators and act while it learns
        (Ape-X). With 0 the learner acts itself.
    random_env_steps: env steps of each learner, at its start, whose actions are uniformly random.
    """

    simulators: PositiveInt = 16
    double_buffer: bool = False
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    actors: NonNegativeInt = 0
    random_env_steps: NonNegativeInt = 0

    gives: ClassVar[str] = "transitions"

    def check(self, run: RunView) -> None:
        check_simulators(self.simulators, self.double_buffer)
        if self.actors > self.simulators:
            raise Refusal(
                f"{self.actors} actors share {self.simulators} simulators, and each needs one. Use --actors "
                f"{self.simulators}, or more simulators."
            )
        self.replay.validate(run.learner.requires.batch)
        self._check_learning(run)
        if self.actors and self.double_buffer:
            raise Refusal("actors step while the learner learns, and need no double buffer. Leave one out.")

    def acting_processes(self) -> int:
        return self.actors

    def batch_shape(self, run: RunView) -> BatchShape:
        rows: int = run.learner.requires.batch
        steps = rows / (self.replay.samples_per_insert * self.simulators)
        return BatchShape(self.simulators, self.actors or 1 + self.double_buffer, steps, rows)

    def cost_settings(self) -> dict[str, Any]:
        replay = self.replay
        own = ("images", "manager", "segments", "segment_draws", "ahead")
        stored = {name: getattr(replay, name) for name in own}
        draws = {"in_files": bool(replay.folder), "uniform": not (replay.alpha or replay.alpha_end)}
        return {"replay": stored | draws}

    def _check_learning(self, run: RunView) -> None:
        """Refuse a run that ends before its learners begin to learn."""
        if run.env_steps is None:
            return
        env_steps, batch = run.env_steps // run.replicas, run.learner.requires.batch
        if env_steps < batch:
            raise Refusal(
                f"each learner makes {env_steps:,} env steps, and a batch has {batch:,} transitions. Use "
                f"more --env-steps, or --agent.batch {max(1, env_steps // 2)}."
            )
        is_random = self.random_env_steps >= env_steps
        if self.replay.learnable(env_steps):
            if is_random:
                raise Refusal(
                    f"each learner makes {env_steps:,} env steps, and its first {self.random_env_steps:,} "
                    "have random actions: its policy would never act. Use more --env-steps, or "
                    f"--random-env-steps {env_steps // 2}."
                )
            if self.replay.planned_updates(env_steps, batch) < 1:
                raise Refusal(
                    f"{env_steps:,} env steps of a learner do not suffice for an update on {batch:,} "
                    f"transitions: after {self.replay.learning_starts:,} each is drawn "
                    f"{self.replay.samples_per_insert:g} times. Use more --env-steps, or a greater "
                    "--replay.samples-per-insert."
                )
            return
        sentence = f"each learner makes {env_steps:,} env steps and begins to learn after"
        starts = self.replay.learning_starts
        if env_steps <= starts:
            acting = f" --random-env-steps {env_steps // 2}" if is_random else ""
            raise Refusal(
                f"{sentence} {starts:,}. Use more --env-steps, or --replay.learning-starts "
                f"{env_steps // 2}{acting}."
            )
        raise Refusal(
            f"{sentence} {starts + self.replay.fit_every:,}. Use more --env-steps, or a smaller "
            "--replay.fit-every."
        )

    def batches(self, run: RunView) -> int | None:
        if run.env_steps is None:
            return None
        env_steps = run.env_steps / run.replicas
        return max(1, self.replay.planned_updates(env_steps, run.learner.requires.batch))

    def batches_at_once(self, run: RunView) -> int:
        env_steps = self.replay.fit_every or self.simulators
        return max(1, int(env_steps * self.replay.ratio / run.learner.requires.batch))

    def memory_bytes(self, run: RunView) -> int:
        stored = self._store_bytes(run)
        if self.replay.folder:
            refuse_full_disk(Path(self.replay.folder), run.replicas * stored)
        requires, step = run.learner.requires, step_bytes(run)
        batches = 2 * (1 + self.replay.ahead) * requires.batch * step
        pending = self.simulators * (SIMULATOR_BYTES + requires.n_step * step)
        return int(memory_bytes(self.replay, stored) + batches + pending + self.actors * PROCESS_BYTES)

    def saved_bytes(self, run: RunView) -> int:
        return self._store_bytes(run) if self.replay.saved else 0

    def _store_bytes(self, run: RunView) -> int:
        requires = run.learner.requires
        return replay_bytes(
            self.replay,
            run.world.spec(),
            simulators=self.simulators,
            steps=requires.n_step,
            batch=requires.batch,
            behaviour=requires.behaviour,
        )

    def check_state(self, state: dict[str, Any]) -> None:
        check_saved_simulators(state, self.simulators)

    def open(self, context: SourceContext) -> Source:
        run, learner, rank = context.run, cast(Agent, context.learner), context.rank
        requires, world = run.learner.requires, cast(SimulatorWorld, run.world)
        seed, spec = derive_seed(run.seed, "source", rank), world.spec()
        store = open_replay(
            self.replay,
            spec,
            simulators=self.simulators,
            steps=requires.n_step,
            discount=requires.discount,
            seed=derive_seed(run.seed, "replay", rank),
            threads=run.placement.threads,
            rank=rank,
            behaviour=requires.behaviour,
            device=context.device,
        )
        joint_weights = self.replay.weights == "all" and run.replicas > 1
        banks = BankWeights(context.channel("banks", CHANNEL_LIKE), run.replicas) if joint_weights else None
        device = context.device
        sampler = ReplaySampler(
            store,
            self.replay,
            requires.batch,
            device,
            context.progress,
            banks,
            random_env_steps=self.random_env_steps,
        )
        first_simulator, total = rank * self.simulators, run.replicas * self.simulators
        if self.actors:
            learner.assign_simulators(first_simulator, total)
            plan = ActorPlan(
                world,
                run.learner,
                self.actors,
                self.simulators,
                rank=rank,
                replicas=run.replicas,
                random_env_steps=self.random_env_steps,
            )
            return ActorSource(plan, spec, learner, sampler, seed=seed)
        groups = open_groups(world, self.simulators, training=True, double_buffer=self.double_buffer)
        return ReplaySource(
            groups,
            learner,
            sampler,
            seed=seed,
            assign=lambda index: learner.assign_simulators(first_simulator + index, total),
            random_env_steps=self.random_env_steps,
        )


class ReplaySource:
    """Yields the batches of ``sampler`` without end (a ``Source``): all simulators take a step whenever no
    batch is due. With a ``ReplaySampler`` batches are due until each transition has been drawn
    ``samples_per_insert`` times on average.

    groups: opened simulators (see ``open_groups``), closed by ``close``. A batch is valid until the next one
        is requested.
    sampler: closed by ``close``. assign: called before each ``act`` with the number of the first simulator
        that it acts for. random_env_steps: see ``ReplaySourceConfig``.
    """

    def __init__(
        self,
        groups: Sequence[Simulators],
        policy: Policy,
        sampler: Sampler,
        *,
        seed: int,
        assign: Callable[[int], None] = lambda index: None,
        random_env_steps: int = 0,
    ) -> None:
        self.policy, self.replay = policy, sampler.replay
        self.alive: Callable[[int], bool] = lambda played: False
        self._groups = SimulatorGroups(groups, policy, seed, sampler.device, self.replay.restart)
        self._assign, self._random_env_steps = assign, random_env_steps
        self.sampler, self._device = sampler, sampler.device
        # the current observations of each group; empty before the start
        self._observations: list[Tensor] = []

    @property
    def exact(self) -> bool:
        self._start()
        if self.sampler.banks is not None:  # weights depend on when those of the other banks were read
            return False
        return self.sampler.exact and self._groups.exact

    def fields(self) -> dict[str, Any]:
        return {**self.sampler.fields(), **self._groups.fields()}

    def events(self) -> Sequence[tuple[str, str]]:
        return self._groups.events()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._start()
        played, episodes = 0, list[Episode]()
        while not self.sampler.due:
            if self.alive(played):
                return Batch(None, played, episodes)
            episodes += self._step_all()
            played += self._groups.size
        return self.sampler.next(played, episodes)

    def _step_all(self) -> list[Episode]:
        """One step of all simulators."""
        groups, actions = self._groups, []
        for g, group in enumerate(groups.groups):
            action = self._act(g)
            groups.memory[g] = action.memory
            actions.append(action._replace(action=action.action.cpu()))
            group.send(actions[g].action)
        self.sampler.before_steps()
        episodes = []
        for g, (group, part) in enumerate(zip(groups.groups, groups.parts, strict=True)):
            step = group.receive()
            groups.note(step.restarts)
            self.sampler.insert(part.start, steps_of(self._observations[g], actions[g], step))
            self._observations[g] = step.observation
            torch.logical_or(step.terminated, step.truncated, out=groups.first[part])
            episodes += [episode.numbered_from(part.start) for episode in step.episodes]
        return episodes

    def _act(self, g: int) -> Action:
        groups, part = self._groups, self._groups.parts[g]
        first = groups.first[part].to(self._device)
        observation = self._observations[g].to(self._device, non_blocking=True)
        self._assign(part.start)
        with torch.no_grad():
            action = self.policy.act(observation, groups.memory[g], first, groups.generator)
            if self.sampler.played < self._random_env_steps:
                random = random_actions(groups.spec, observation, groups.generator)
                action = action._replace(action=random)
        return action

    def _start(self) -> None:
        if not self._observations:
            self._observations = self._groups.start(self.sampler.batches)

    def state(self) -> dict[str, Any]:
        """Call it between two batches only."""
        self._start()
        return {**self.sampler.state(), **self._groups.state(torch.cat(self._observations))}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. If the replay was not saved, it is empty, and the learner continues as
        soon as a batch can be drawn."""
        self._groups.check_state(state)
        self.sampler.load(state)
        self._observations = self._groups.load(state, self.sampler.batches)

    def fresh_start(self, batches: int) -> None:
        """Begin in the middle of a run with an empty replay."""
        self.sampler.fresh_start(batches)
        self._observations = self._groups.fresh_start(batches)

    def close(self) -> None:
        self.sampler.close()
        self._groups.close()
