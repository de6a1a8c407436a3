"""Batches from a replay that fills while they are drawn: one process alternates between acting and
learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from murmurate.agents.interface import Action, Agent, Policy
from murmurate.errors import Refusal
from murmurate.replay.config import ReplayConfig, memory_bytes, open_replay, replay_bytes
from murmurate.replay.memory import refuse_full_disk
from murmurate.sources.actor_source import ActorPlan, ActorSource
from murmurate.sources.bank_weights import LIKE, BankWeights
from murmurate.sources.interface import RunView, Source, SourceConfig, SourceContext
from murmurate.sources.replay_sampler import ReplaySampler
from murmurate.sources.rollouts import check_saved_simulators, check_simulators, open_groups
from murmurate.sources.steps import random_actions, steps_of
from murmurate.spec import Batch, EnvSpec, Episode, derive_generator, derive_seed
from murmurate.worlds.interface import Simulators, SimulatorWorld

_ACTOR_BYTES = 150 * 2**20


@dataclass(frozen=True)
class ReplaySourceConfig(SourceConfig):
    """Batches of transitions from a replay, which the learner or its actor processes fill.

    simulators: per learner. double_buffer: act for one half of the simulators while the other half steps in
        native threads.
    replay: size, sampling and storage of each learner's replay.
    actors: actor processes of each learner; they share its simulators and act while it learns (Ape-X). With 0
        the learner acts itself.
    random_env_steps: env steps of each learner, at its start, whose actions are uniformly random.
    """

    simulators: int = 16
    double_buffer: bool = False
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    actors: int = 0
    random_env_steps: int = 0

    gives: ClassVar[str] = "transitions"

    def check(self, run: RunView) -> None:
        check_simulators(self.simulators, self.double_buffer)
        for name in ("actors", "random_env_steps"):
            if getattr(self, name) < 0:
                raise Refusal(f"{name} is {getattr(self, name)}; it must be at least 0.")
        if self.actors > self.simulators:
            raise Refusal(
                f"{self.actors} actors share {self.simulators} simulators, and each needs one. Use --actors "
                f"{self.simulators}, or more simulators."
            )
        self.replay.validate(run.learner.requires.batch)
        self._check_learning(run)
        if self.actors and self.double_buffer:
            raise Refusal("actors step while the learner learns, and need no double buffer. Leave one out.")
        if self.actors and run.launcher == "inline":
            raise Refusal("actors are processes, and the inline launcher has none. Use --launcher local.")

    def _check_learning(self, run: RunView) -> None:
        """Refuse a run that ends before its learners begin to learn."""
        if run.env_steps is None or self.replay.learnable(own := run.env_steps // run.replicas):
            return
        first = f"each learner makes {own:,} env steps and begins to learn after"
        starts = self.replay.learning_starts
        if own <= starts:
            raise Refusal(f"{first} {starts:,}. Use more --env-steps, or --replay.learning-starts 1000.")
        raise Refusal(
            f"{first} {starts + self.replay.fit_every:,}. Use more --env-steps, or a smaller "
            "--replay.fit-every."
        )

    def batches(self, run: RunView) -> int | None:
        if run.env_steps is None:
            return None
        own = run.env_steps / run.replicas
        return max(1, self.replay.planned_updates(own, run.learner.requires.batch))

    def memory_bytes(self, run: RunView) -> int:
        stored = self._store_bytes(run)
        if self.replay.folder:
            refuse_full_disk(Path(self.replay.folder), run.replicas * stored)
        return memory_bytes(self.replay, stored) + self.actors * _ACTOR_BYTES

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
        )
        shared = self.replay.weights == "all" and run.replicas > 1
        banks = BankWeights(context.channel("banks", LIKE), run.replicas) if shared else None
        device = context.device
        sampler = ReplaySampler(store, self.replay, requires.batch, device, context.progress, banks)
        first, total = rank * self.simulators, run.replicas * self.simulators
        if self.actors:
            learner.assign_simulators(first, total)
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
            assign=lambda low: learner.assign_simulators(first + low, total),
            random_env_steps=self.random_env_steps,
        )


class ReplaySource:
    """Yields ``Batch(data=Sample)`` without end (a ``Source``): all simulators take a step whenever the
    learner has drawn each transition ``samples_per_insert`` times on average.

    ``groups`` are opened simulators (see ``open_groups``), closed by ``close``; while one group steps in
    native threads the agent acts for another. A batch is valid until the next one is asked for.

    sampler: closed by ``close``. assign: called before each ``act`` with the number of the first simulator
        that it acts for. random_env_steps: see ``ReplaySourceConfig``.
    """

    def __init__(
        self,
        groups: Sequence[Simulators],
        policy: Policy,
        sampler: ReplaySampler,
        *,
        seed: int,
        assign: Callable[[int], None] = lambda low: None,
        random_env_steps: int = 0,
    ) -> None:
        self.policy, self.replay = policy, sampler.replay
        self.alive: Callable[[int], bool] = lambda played: False
        self._groups = list(groups)
        self._spec: EnvSpec = groups[0].spec
        self._seed, self._assign = seed, assign
        self._random = random_env_steps
        self._sampler, self._device = sampler, sampler.device
        ends = torch.tensor([group.size for group in groups]).cumsum(0).tolist()
        self._slices = [slice(end - group.size, end) for end, group in zip(ends, groups, strict=True)]
        self._size = int(ends[-1])
        self._generator = derive_generator(seed, "actions", device=self._device)
        self._started = False
        self._now: list[Tensor] = []  # the present observations of each group
        self._first = torch.ones(self._size, dtype=torch.bool)
        self._memory: list[Tensor | None] = [None] * len(self._groups)

    @property
    def exact(self) -> bool:
        self._start()
        if self._sampler.banks is not None:  # weights depend on when the other banks were read
            return False
        return self._sampler.exact and all(group.state() is not None for group in self._groups)

    def fields(self) -> dict[str, Any]:
        return self._sampler.fields()

    def events(self) -> Sequence[tuple[str, str]]:
        return ()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._start()
        played, episodes = 0, list[Episode]()
        while not self._sampler.due:
            if self.alive(played):
                return Batch(None, played, episodes)
            episodes += self._step_all()
            played += self._size
        return self._sampler.next(played, episodes)

    def _step_all(self) -> list[Episode]:
        """One step of all simulators."""
        chosen = []
        for g, group in enumerate(self._groups):
            action = self._act(g)
            self._memory[g] = action.memory
            chosen.append(action._replace(action=action.action.cpu()))
            group.send(chosen[g].action)
        self._sampler.before_steps()
        episodes = []
        for g, group in enumerate(self._groups):
            part, step = self._slices[g], group.receive()
            self._sampler.insert(part.start, steps_of(self._now[g], chosen[g], step))
            self._now[g] = step.observation
            torch.logical_or(step.terminated, step.truncated, out=self._first[part])
            episodes += [Episode(part.start + e.simulator, e.episode_return, e.length) for e in step.episodes]
        return episodes

    def _act(self, g: int) -> Action:
        first = self._first[self._slices[g]].to(self._device)
        seen = self._now[g].to(self._device, non_blocking=True)
        self._assign(self._slices[g].start)
        with torch.no_grad():
            action = self.policy.act(seen, self._memory[g], first, self._generator)
            if self._sampler.played < self._random:
                random = random_actions(self._spec, len(seen), self._generator)
                action = action._replace(action=random, action_value=None, greedy_value=None)
        return action

    def _start(self) -> None:
        if not self._started:
            self._now = [self._begun(g) for g in range(len(self._groups))]
            self._started = True

    def _begun(self, g: int) -> Tensor:
        """New episodes for a group; after a resume not those that it began with."""
        group, part = self._groups[g], self._slices[g]
        step = group.reset(derive_seed(self._seed, "games", self._sampler.batches))
        self._first[part] = True
        self._memory[g] = self.policy.initial_memory(group.size)
        self.replay.restart(part.start, group.size)
        return step.observation

    def state(self) -> dict[str, Any]:
        """Between two batches only. Groups that cannot be saved are None in it."""
        self._start()
        memory = [part for part in self._memory if part is not None]
        return {
            **self._sampler.state(),
            "groups": [group.state() for group in self._groups],
            "generator": self._generator.get_state(),
            "observation": torch.cat(self._now),
            "first": self._first.clone(),
            "memory": torch.cat(memory) if memory else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; groups that could not be saved begin new episodes, unlike any before. Where
        the replay is not in it, the learner goes on as soon as a batch can be drawn.

        Raises ``ValueError`` for a state of other groups.
        """
        if len(state["groups"]) != len(self._groups) or len(state["first"]) != self._size:
            raise ValueError(
                f"the state is of {len(state['first'])} simulators in {len(state['groups'])} groups, "
                f"these are {self._size} in {len(self._groups)}"
            )
        self._generator.set_state(state["generator"])
        self._sampler.load(state)
        self._now = []
        for g, (group, saved) in enumerate(zip(self._groups, state["groups"], strict=True)):
            part = self._slices[g]
            if saved is None:
                self._now.append(self._begun(g))
                continue
            group.load(saved)
            self._now.append(state["observation"][part].clone())
            self._first[part] = state["first"][part]
            memory = state["memory"]
            self._memory[g] = None if memory is None else memory[part].to(self._device, copy=True)
        self._started = True

    def fresh_start(self, batches: int) -> None:
        """New episodes, actions from a generator of its own, and an empty replay."""
        self._sampler.fresh_start(batches)
        purpose = f"actions after batch {batches}"
        self._generator = derive_generator(self._seed, purpose, device=self._device)
        self._started = False
        self._start()

    def close(self) -> None:
        self._sampler.close()
        for group in self._groups:
            group.close()
