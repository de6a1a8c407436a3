"""Rollouts: an agent acts in simulators for ``T`` steps, which make a ``Trajectory``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from murmurate.agents.interface import Agent, Policy
from murmurate.errors import Refusal
from murmurate.ranges import PositiveInt
from murmurate.sources.interface import BatchShape, RunView, SourceConfig, SourceContext
from murmurate.sources.simulator_groups import (
    SIMULATOR_BYTES,
    SimulatorGroups,
    check_saved_simulators,
    check_simulators,
    open_groups,
    step_bytes,
)
from murmurate.spec import Batch, EnvSpec, Episode, Shapes, TimeStep, Trajectory, derive_seed
from murmurate.worlds.interface import Simulators, SimulatorWorld


@dataclass(frozen=True)
class RolloutSourceConfig(SourceConfig):
    """Rollouts of the learner's own policy.

    simulators: number of simulators of each learner. double_buffer: act for one half of the simulators while
        the other half steps in native threads or another process; useless where the learner waits
        while they step, as for gymnasium's unless ``served``.
    """

    simulators: PositiveInt = 16
    double_buffer: bool = False

    gives: ClassVar[str] = "rollouts"

    def check(self, run: RunView) -> None:
        check_simulators(self.simulators, self.double_buffer)
        requires = run.learner.requires
        if requires.steps < 1:
            raise Refusal(
                f"agent.steps is {requires.steps}; a rollout has at least one. Use --agent.steps 5."
            )
        if self.simulators < requires.simulators:
            raise Refusal(
                f"{run.learner.name} divides a rollout of {self.simulators} simulators into more minibatches "
                f"than it has simulators. Use --simulators {requires.simulators}, or fewer minibatches."
            )

    def batch_shape(self, run: RunView) -> BatchShape:
        steps: int = run.learner.requires.steps
        return BatchShape(self.simulators, 1 + self.double_buffer, steps, steps * self.simulators)

    def cost_settings(self) -> dict[str, Any]:
        return {}

    def batches(self, run: RunView) -> int | None:
        if run.env_steps is None:
            return None
        steps: int = run.learner.requires.steps
        return max(1, run.env_steps // (run.replicas * self.simulators * steps))

    def memory_bytes(self, run: RunView) -> int:
        steps: int = run.learner.requires.steps
        return self.simulators * (SIMULATOR_BYTES + 2 * (steps + 1) * step_bytes(run))

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
            # several replicas finish their rollouts: synchronous ones stop together, after a round
            pauses=run.replicas == 1 and not run.strategy.centre,
        )


class RolloutSource:
    """Yields ``Batch(data=Trajectory, env_steps=T*B, episodes=...)`` without end (a ``Source``).

    groups: opened simulators (see ``open_groups``), closed by ``close``. steps: T. device: device of the
    batches' tensors, which are reused: a batch is valid until the one after next is requested. seed: seed of
    actions and simulators. behaviour: see ``spec.Rollouts``. pauses: whether a request to stop ends a rollout
    before its last step. The next batch, also after ``state`` and ``load``, then continues it bit for bit if
    the simulators can be saved; if not, its steps are lost.

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
        pauses: bool = False,
    ) -> None:
        if steps < 1:
            raise ValueError(f"rollouts need at least one step, got {steps}")
        self.policy = policy
        self.alive: Callable[[int], bool] = lambda played: False
        self._steps, self._device, self._pauses = steps, torch.device(device), pauses
        self._groups = SimulatorGroups(groups, policy, seed, self._device)
        spec, parts, shapes = self._groups.spec, self._groups.parts, dict(behaviour or {})
        self._buffers = [_RolloutBuffers(spec, steps, parts, self._device, shapes) for _ in range(2)]
        self._batches = 0
        self._begun = 0  # steps of the next batch that were made before a pause, and are in its buffers
        self._generators: list[Tensor] = []  # states of torch's global generators at the pause
        self._observation: Tensor | None = None  # the observation to act on next; None before the start

    @property
    def exact(self) -> bool:
        self._current_observation()  # starts the simulators: before that they have no state
        return self._groups.exact

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        observation, groups = self._current_observation(), self._groups
        buffers = self._buffers[self._batches % 2]
        if (begun := self._begun) > 0:
            self._set_global_generators()
        else:
            buffers.begin(observation, groups.first, groups.joined_memory())
        episodes: list[Episode] = []
        for t in range(begun, self._steps + 1):
            is_pause = self.alive(0) and self._pauses and t < self._steps
            for g, group in enumerate(groups.groups):
                if t > begun:
                    step = group.receive()
                    groups.note(step.restarts)
                    episodes += buffers.put(t, g, step)
                if t < self._steps and not is_pause:
                    group.send(self._act(buffers, t, g))
            if is_pause:
                self._pause(buffers, t)
                return Batch(None, (t - begun) * groups.size, episodes)
        self._begun = 0
        self._observation = buffers.observation[self._steps]
        groups.first = buffers.first[self._steps]
        self._batches += 1
        return Batch(buffers.trajectory(), (self._steps - begun) * groups.size, episodes)

    def fields(self) -> dict[str, Any]:
        return self._groups.fields()

    def events(self) -> Sequence[tuple[str, str]]:
        return self._groups.events()

    def state(self) -> dict[str, Any]:
        """Call it between two batches only."""
        state = {"batches": self._batches, **self._groups.state(self._current_observation())}
        if self._begun:
            rows = self._buffers[self._batches % 2].state(self._begun)
            state["begun"] = {"steps": self._begun, "generators": self._generators, "buffers": rows}
        return state

    def load(self, state: dict[str, Any]) -> None:
        self._batches = state["batches"]
        self._observation = self._joined(self._groups.load(state, self._batches))
        begun = state.get("begun", {"steps": 0, "generators": []})
        self._begun, self._generators = begun["steps"], begun["generators"]
        if self._begun:
            self._buffers[self._batches % 2].load(begun["buffers"])

    def fresh_start(self, batches: int) -> None:
        self._batches, self._begun = batches, 0
        self._observation = self._joined(self._groups.fresh_start(batches))

    def close(self) -> None:
        self._groups.close()

    def _current_observation(self) -> Tensor:
        if self._observation is None:
            self._observation = self._joined(self._groups.start(self._batches))
        return self._observation

    def _joined(self, observations: list[Tensor]) -> Tensor:
        return torch.cat(observations).to(self._device)

    def _pause(self, buffers: _RolloutBuffers, steps: int) -> None:
        """End the rollout, of which so many steps were made."""
        self._observation = buffers.observation[steps].clone()
        self._groups.first = buffers.first[steps].clone()
        self._begun = steps if self._groups.exact else 0
        self._generators = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._generators.append(torch.cuda.get_rng_state(self._device))

    def _set_global_generators(self) -> None:
        """As at the pause: the training loop has seeded them for the whole batch."""
        torch.set_rng_state(self._generators[0])
        if self._device.type == "cuda" and len(self._generators) > 1:
            torch.cuda.set_rng_state(self._generators[1], self._device)

    def _act(self, buffers: _RolloutBuffers, t: int, g: int) -> Tensor:
        """Act in step t for group g, and record the actions in ``buffers``."""
        before, groups = buffers.before[t][g], self._groups
        first = before.first.to(self._device, non_blocking=True)
        with torch.no_grad():
            action = self.policy.act(before.observation, groups.memory[g], first, groups.generator)
        groups.memory[g] = action.memory
        after = buffers.after[t][g]
        after.action.copy_(action.action)
        for name, recorded in after.behaviour.items():
            recorded.copy_(action.behaviour[name])
        return action.action.cpu()


class _Before(NamedTuple):
    """Views of one group's inputs before step t (t up to T), made once: slicing at each step would cost as
    much as the copies themselves. stage: pinned memory, through which observations go to a GPU; else None."""

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


class _RolloutBuffers:
    """The tensors of one batch, allocated once, time-major; ``put`` writes into slices of them.

    Observations go to the device step by step, because acting needs them there; the small other tensors are
    gathered on the host and copied at the end. For a GPU the host's memory is pinned. Reusing it is safe:
    reading the next action back waits for all copies that were queued before.
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
        self._rows = {
            "observation": self.observation,
            "action": self.action,
            "reward": self._reward,
            "terminated": self._terminated,
            "truncated": self._truncated,
            "first": self.first,
            **{f"behaviour.{name}": x for name, x in self._behaviour.items()},
        }
        self.before = [
            [_Before(o[part], f[part], None if stage is None else stage[part]) for part in parts]
            for o, f in zip(self.observation, self.first, strict=True)
        ]
        outcome = (self.action, self._reward, self._terminated, self._truncated)

        def after(t: int, part: slice) -> _After:
            action, reward, terminated, truncated = (x[t, part] for x in outcome)
            recorded = {name: x[t, part] for name, x in self._behaviour.items()}
            return _After(action, reward, terminated, truncated, recorded)

        self.after = [[after(t, part) for part in parts] for t in range(steps)]

    def begin(self, observation: Tensor, first: Tensor, memory: Tensor | None) -> None:
        self.observation[0] = observation
        self.first[0] = first
        self._memory = memory
        self._truncated_observations = []

    def state(self, steps: int) -> dict[str, Any]:
        """What was written in so many steps, fewer than all."""
        final = self._truncated_observations
        return {
            "rows": {name: x[: steps + 1].cpu().clone() for name, x in self._rows.items()},
            "truncated_observation": torch.cat(final) if final else None,
            "memory": None if self._memory is None else self._memory.cpu().clone(),
        }

    def load(self, state: dict[str, Any]) -> None:
        for name, rows in state["rows"].items():
            self._rows[name][: len(rows)].copy_(rows)
        final, memory = state["truncated_observation"], state["memory"]
        self._truncated_observations = [] if final is None else [final]
        self._memory = None if memory is None else memory.to(self._device)

    def put(self, t: int, g: int, step: TimeStep) -> list[Episode]:
        """Write the outcome of action t - 1 of group g; return the episodes that it ended."""
        before, after = self.before[t][g], self.after[t - 1][g]
        if before.stage is None:
            before.observation.copy_(step.observation)
        else:
            before.stage.copy_(step.observation)
            before.observation.copy_(before.stage, non_blocking=True)
        after.reward.copy_(step.reward)
        after.terminated.copy_(step.terminated)
        after.truncated.copy_(step.truncated)
        torch.logical_or(step.terminated, step.truncated, out=before.first)
        if step.final_observation is not None and step.truncated.any():
            self._truncated_observations.append(step.final_observation[step.truncated])
        first_simulator = self._parts[g].start
        return [episode.numbered_from(first_simulator) for episode in step.episodes]

    def trajectory(self) -> Trajectory:
        def on_device(x: Tensor) -> Tensor:
            return x.to(self._device, non_blocking=True)

        final = self._truncated_observations
        return Trajectory(
            observation=self.observation[: self._steps],
            action=self.action,
            reward=on_device(self._reward),
            terminated=on_device(self._terminated),
            truncated=on_device(self._truncated),
            first=on_device(self.first[: self._steps]),
            last_observation=self.observation[self._steps],
            # row-major, because within a step groups are received in order
            truncated_observation=torch.cat(final).to(self._device) if final else None,
            memory=self._memory,
            behaviour=self._behaviour,
        )
