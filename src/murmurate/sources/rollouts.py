"""Rollouts: an agent acts in simulators for ``T`` steps, which make a ``Trajectory``.

Simulators may come in several groups (two for double buffering): while one group steps in native
threads, the agent acts for another. Whatever the number of groups, the trajectories look the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from murmurate.agents.interface import Agent, Policy
from murmurate.errors import Refusal
from murmurate.sources.interface import RunView, SourceConfig, SourceContext
from murmurate.spec import (
    Batch,
    EnvSpec,
    Episode,
    Shapes,
    TimeStep,
    Trajectory,
    derive_generator,
    derive_seed,
)
from murmurate.worlds.interface import Simulators, SimulatorWorld


@dataclass(frozen=True)
class RolloutSourceConfig(SourceConfig):
    """Rollouts of the learner's own policy.

    simulators: per learner. double_buffer: act for one half of the simulators while the other half steps in
        native threads.
    """

    simulators: int = 16
    double_buffer: bool = False

    gives: ClassVar[str] = "rollouts"

    def check(self, run: RunView) -> None:
        check_simulators(self.simulators, self.double_buffer)
        steps = run.learner.requires.steps
        if steps < 1:
            raise Refusal(f"agent.steps is {steps}; a rollout has at least one. Use --agent.steps 5.")

    def batches(self, run: RunView) -> int | None:
        if run.env_steps is None:
            return None
        steps: int = run.learner.requires.steps
        return max(1, run.env_steps // (run.replicas * self.simulators * steps))

    def check_state(self, state: dict[str, Any]) -> None:
        check_saved_simulators(state, self.simulators)

    def open(self, context: SourceContext) -> RolloutSource:
        run, learner = context.run, cast(Agent, context.learner)
        groups = open_groups(
            cast(SimulatorWorld, run.world), self.simulators, training=True, double_buffer=self.double_buffer
        )
        requires = run.learner.requires
        return RolloutSource(
            groups,
            learner,
            requires.steps,
            seed=derive_seed(run.seed, "source", context.rank),
            device=context.device,
            behaviour=requires.behaviour,
        )


def check_simulators(simulators: int, double_buffer: bool) -> None:
    """Raise Refusal for fewer simulators than groups."""
    if simulators < 1 + double_buffer:
        halves = " for each half of a double buffer" if double_buffer else ""
        raise Refusal(f"simulators is {simulators}; a learner needs at least one{halves}.")


def check_saved_simulators(state: dict[str, Any], simulators: int) -> None:
    """Raise Refusal for the state of a source with another number of simulators."""
    saved = len(state["first"])
    if saved != simulators:
        raise Refusal(
            f"it was made with {saved} simulators a learner and the run has {simulators}. "
            f"Use --simulators {saved}."
        )


def open_groups(
    world: SimulatorWorld, simulators: int, *, training: bool, double_buffer: bool = False, threads: int = 1
) -> list[Simulators]:
    """All ``simulators`` in one group, or in two halves if ``double_buffer``; ``threads`` is per group.

    The halves have the same random seeds as the one group. Raises ``Refusal`` for fewer simulators than
    groups.
    """
    check_simulators(simulators, double_buffer)
    groups = 2 if double_buffer else 1
    bounds = [simulators * g // groups for g in range(groups + 1)]
    return [
        world.open(high - low, training=training, threads=threads, first=low)
        for low, high in itertools.pairwise(bounds)
    ]


class RolloutSource:
    """Yields ``Batch(data=Trajectory, env_steps=T*B, episodes=...)`` without end (a ``Source``).

    ``groups`` are opened simulators (see ``open_groups``), closed by ``close``. ``steps`` is T. The
    tensors live on ``device`` and are reused: a batch is valid until the one after next is asked for.
    Actions are drawn with a generator derived from ``seed``, as are the simulators' seeds. ``behaviour``: see
    ``spec.Rollouts``.

    Raises ``ValueError`` for T < 1, no group, or groups of different worlds.
    """

    def __init__(
        self,
        groups: Sequence[Simulators],
        policy: Policy,
        steps: int,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        behaviour: Shapes | None = None,
    ) -> None:
        if steps < 1 or not groups:
            raise ValueError(f"rollouts need at least one step and one group, got {steps} and {len(groups)}")
        if any(group.spec != groups[0].spec for group in groups):
            raise ValueError(f"groups must be of one world, got {[group.spec.name for group in groups]}")
        self.policy = policy
        self.alive: Callable[[int], bool] = lambda played: False  # not called: a rollout is short
        self._groups = list(groups)
        self._steps = steps
        self._seed = seed
        self._device = torch.device(device)
        ends = torch.tensor([group.size for group in groups]).cumsum(0).tolist()
        self._slices = [slice(end - group.size, end) for end, group in zip(ends, groups, strict=True)]
        self._size = int(ends[-1])
        recorded = dict(behaviour or {})
        self._sets = [_Set(self.spec, steps, self._slices, self._device, recorded) for _ in range(2)]
        self._generator = derive_generator(seed, "actions", device=self._device)
        self._batches = 0
        self._started = False
        # input of the next step; of the second set at first, and later of whichever was filled last
        self._observation = self._sets[1].observation[steps]
        self._first = torch.ones(self._size, dtype=torch.bool)
        self._memory: list[Tensor | None] = [None] * len(self._groups)

    @property
    def spec(self) -> EnvSpec:
        return self._groups[0].spec

    @property
    def size(self) -> int:
        """B, over all groups."""
        return self._size

    @property
    def exact(self) -> bool:
        """Whether resuming from ``state`` is bit-exact."""
        if not self._started:
            self._start()
        return all(group.state() is not None for group in self._groups)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._started:
            self._start()
        into = self._sets[self._batches % 2]
        into.begin(self._observation, self._first, self._joined_memory())
        episodes: list[Episode] = []
        for t in range(self._steps + 1):
            for g, group in enumerate(self._groups):
                if t > 0:
                    episodes += into.put(t, g, group.receive())
                if t < self._steps:
                    group.send(self._act(into, t, g))
        self._observation = into.observation[self._steps]
        self._first = into.first[self._steps]
        self._batches += 1
        return Batch(into.trajectory(), self._steps * self._size, episodes)

    def fields(self) -> dict[str, Any]:
        return {}

    def events(self) -> Sequence[tuple[str, str]]:
        return ()

    def state(self) -> dict[str, Any]:
        """Between two batches only. Groups that cannot be saved are None in it."""
        if not self._started:
            self._start()
        memory = self._joined_memory()
        return {
            "batches": self._batches,
            "groups": [group.state() for group in self._groups],
            "generator": self._generator.get_state(),
            "observation": self._observation.cpu().clone(),
            "first": self._first.clone(),
            "memory": None if memory is None else memory.cpu().clone(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; groups that could not be saved begin new episodes, with new seeds.

        Raises ``ValueError`` for a state of other groups.
        """
        if len(state["groups"]) != len(self._groups) or len(state["first"]) != self._size:
            raise ValueError(
                f"the state is of {len(state['first'])} simulators in {len(state['groups'])} groups, "
                f"these are {self._size} in {len(self._groups)}"
            )
        self._batches = state["batches"]
        self._generator.set_state(state["generator"])
        self._observation = state["observation"].to(self._device, copy=True)
        self._first = state["first"].clone()
        for g, (group, saved) in enumerate(zip(self._groups, state["groups"], strict=True)):
            part = self._slices[g]
            if saved is None:
                self._restart(g)
                continue
            group.load(saved)
            memory = state["memory"]
            self._memory[g] = None if memory is None else memory[part].to(self._device, copy=True)
        self._started = True

    def fresh_start(self, batches: int) -> None:
        """New episodes, and actions from a generator of its own."""
        self._batches = batches
        purpose = f"actions after batch {batches}"
        self._generator = derive_generator(self._seed, purpose, device=self._device)
        self._start()

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _start(self) -> None:
        for g in range(len(self._groups)):
            self._restart(g)
        self._started = True

    def _restart(self, g: int) -> None:
        """New episodes for a group, seeded by the number of batches so far."""
        part, group = self._slices[g], self._groups[g]
        step = group.reset(derive_seed(self._seed, "games", self._batches))
        self._observation[part] = step.observation.to(self._device)
        self._first[part] = True
        self._memory[g] = self.policy.initial_memory(group.size)

    def _act(self, into: _Set, t: int, g: int) -> Tensor:
        now = into.before[t][g]
        first = now.first.to(self._device, non_blocking=True)
        with torch.no_grad():
            chosen = self.policy.act(now.observation, self._memory[g], first, self._generator)
        self._memory[g] = chosen.memory
        after = into.after[t][g]
        after.action.copy_(chosen.action)
        for name, recorded in after.behaviour.items():
            recorded.copy_(chosen.behaviour[name])
        return chosen.action.cpu()

    def _joined_memory(self) -> Tensor | None:
        parts = [memory for memory in self._memory if memory is not None]
        return torch.cat(parts) if parts else None


class _Before(NamedTuple):
    """Views of one group's inputs before step t (t up to T). Slicing at each step would cost as much as the
    copies themselves."""

    observation: Tensor
    first: Tensor
    stage: Tensor | None


class _After(NamedTuple):
    """Views of one group's actions in step t and their outcome."""

    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    behaviour: Mapping[str, Tensor]


class _Set:
    """The tensors of one batch, allocated once, time-major; ``put`` writes into slices of them.

    Observations go to the device step by step, because acting needs them there; the small rest is
    gathered on the host and sent at the end. On a GPU the host's side is pinned. Its reuse is safe:
    reading the next action back waits for all copies queued before it.
    """

    def __init__(
        self, spec: EnvSpec, steps: int, parts: Sequence[slice], device: torch.device, behaviour: Shapes
    ) -> None:
        pin = device.type == "cuda"
        size = parts[-1].stop
        self._device = device
        self._steps = steps
        self._parts = parts
        shape = (size, *spec.observation_shape)
        self.observation = torch.zeros((steps + 1, *shape), dtype=spec.observation_dtype, device=device)
        stage = torch.empty(shape, dtype=spec.observation_dtype, pin_memory=True) if pin else None
        self.action = (
            torch.zeros(steps, size, dtype=torch.int64, device=device)
            if spec.actions
            else torch.zeros(steps, size, *spec.action_shape, device=device)
        )
        self._reward = torch.zeros(steps, size, pin_memory=pin)
        self._terminated = torch.zeros(steps, size, dtype=torch.bool, pin_memory=pin)
        self._truncated = torch.zeros(steps, size, dtype=torch.bool, pin_memory=pin)
        self.first = torch.zeros(steps + 1, size, dtype=torch.bool, pin_memory=pin)
        self._behaviour = {
            name: torch.zeros(steps, size, *shape, device=device) for name, shape in behaviour.items()
        }
        self._truncated_observations: list[Tensor] = []
        self._memory: Tensor | None = None
        self.before = [
            [_Before(o[part], f[part], None if stage is None else stage[part]) for part in parts]
            for o, f in zip(self.observation, self.first, strict=True)
        ]
        each = (self.action, self._reward, self._terminated, self._truncated)

        def after(t: int, part: slice) -> _After:
            action, reward, terminated, truncated = (x[t, part] for x in each)
            recorded = {name: x[t, part] for name, x in self._behaviour.items()}
            return _After(action, reward, terminated, truncated, recorded)

        self.after = [[after(t, part) for part in parts] for t in range(steps)]

    def begin(self, observation: Tensor, first: Tensor, memory: Tensor | None) -> None:
        self.observation[0] = observation
        self.first[0] = first
        self._memory = memory
        self._truncated_observations = []

    def put(self, t: int, g: int, step: TimeStep) -> list[Episode]:
        """Write what followed action t - 1 of group g; return its ended episodes."""
        now, past = self.before[t][g], self.after[t - 1][g]
        if now.stage is None:
            now.observation.copy_(step.observation)
        else:
            now.stage.copy_(step.observation)
            now.observation.copy_(now.stage, non_blocking=True)
        past.reward.copy_(step.reward)
        past.terminated.copy_(step.terminated)
        past.truncated.copy_(step.truncated)
        torch.logical_or(step.terminated, step.truncated, out=now.first)
        if step.final_observation is not None:
            self._truncated_observations.append(step.final_observation[step.truncated])
        low = self._parts[g].start
        return [Episode(low + e.simulator, e.episode_return, e.length) for e in step.episodes]

    def trajectory(self) -> Trajectory:
        def on_device(x: Tensor) -> Tensor:
            return x.to(self._device, non_blocking=True)

        ends = self._truncated_observations
        return Trajectory(
            observation=self.observation[: self._steps],
            action=self.action,
            reward=on_device(self._reward),
            terminated=on_device(self._terminated),
            truncated=on_device(self._truncated),
            first=on_device(self.first[: self._steps]),
            last_observation=self.observation[self._steps],
            # Within a step the groups were received in order, so these rows are row-major already.
            truncated_observation=torch.cat(ends).to(self._device) if ends else None,
            memory=self._memory,
            behaviour=self._behaviour,
        )
