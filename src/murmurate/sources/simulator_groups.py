"""The simulators of one learner, in one or two groups.

With two (double buffering), the agent acts for one group while the other steps in the background, where the
world's simulators do (``SimulatorWorld.steps_in_background``). The number of groups changes nothing else:
seeds, and the order of simulators in batches, are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.agents.interface import Policy
from murmurate.errors import Refusal
from murmurate.sources.interface import RunView
from murmurate.spec import EnvSpec, derive_generator, derive_seed, restore_generator
from murmurate.worlds.interface import Simulators, SimulatorWorld

SIMULATOR_BYTES = 2_000  # memory of one simulator, at least
_ALL_TOLD = 10  # messages about replaced simulators that are told before they become fewer


def step_bytes(run: RunView) -> int:
    """Memory of one step of one simulator: its observation, action and a few numbers."""
    spec = run.world.spec()
    observation_bytes = math.prod(spec.observation_shape) * spec.observation_dtype.itemsize
    behaviour_size = sum(math.prod(shape) for shape in run.learner.requires.behaviour.values())
    return int(observation_bytes + 4 * (math.prod(spec.action_shape) + behaviour_size) + 16)


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


def check_loaded_simulators(state: dict[str, Any], simulators: int) -> None:
    """Raise ValueError for the state of a source with another number of simulators."""
    if (saved := len(state["first"])) != simulators:
        raise ValueError(f"the state is of {saved} simulators, not {simulators}")


def open_groups(
    world: SimulatorWorld, simulators: int, *, training: bool, double_buffer: bool = False
) -> list[Simulators]:
    """All ``simulators`` in one group, or in two halves if ``double_buffer``.

    Raises ``Refusal`` for fewer simulators than groups.
    """
    check_simulators(simulators, double_buffer)
    groups = 2 if double_buffer else 1
    bounds = [simulators * g // groups for g in range(groups + 1)]
    return [
        world.open(stop - start, training=training, first=start) for start, stop in itertools.pairwise(bounds)
    ]


class RestartMessages:
    """Chooses which messages about replaced simulators are told, so that an environment that keeps failing
    does not fill the log: the first ten, then the 16th, the 32nd, the 64th and so on.

    count: number of simulators that were replaced.
    """

    def __init__(self) -> None:
        self.count = self._messages = 0

    def told(self, restarts: Sequence[str]) -> list[str]:
        """Count ``TimeStep.restarts``; return what to tell of them. Equal messages come from one process and
        are told once."""
        self.count += len(restarts)
        told = []
        for message in dict.fromkeys(restarts):
            self._messages += 1
            if self._messages <= _ALL_TOLD:
                told.append(message)
            elif self._messages.bit_count() == 1:  # a power of two
                told.append(
                    f"{message}. {self.count:,} simulators have been started again so far; the next line "
                    f"like this is message {2 * self._messages:,}"
                )
        return told


class SimulatorGroups:
    """Opened groups with the recurrent state of the agent in each, and the generator of its actions.

    on_reset: called with (first simulator, number of simulators) of a group that begins new episodes.

    Attributes:
        parts: the slice of each group among all simulators. size: size of all groups together.
        first: [size] bool, whether the next observation begins an episode.
        memory: recurrent state of the agent in each group; None if the agent is not recurrent.

    Raises ``ValueError`` for no group, or groups of different worlds.
    """

    def __init__(
        self,
        groups: Sequence[Simulators],
        policy: Policy,
        seed: int,
        device: torch.device,
        on_reset: Callable[[int, int], None] = lambda first_simulator, count: None,
    ) -> None:
        if not groups:
            raise ValueError("a source needs at least one group of simulators")
        if any(group.spec != groups[0].spec for group in groups):
            raise ValueError(f"groups must be of one world, got {[group.spec.name for group in groups]}")
        self.groups = list(groups)
        self.generator = derive_generator(seed, "actions", device=device)
        bounds = itertools.accumulate((group.size for group in groups), initial=0)
        self.parts = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
        self.size = self.parts[-1].stop
        self.first = torch.ones(self.size, dtype=torch.bool)
        self.memory: list[Tensor | None] = [None] * len(self.groups)
        self._restarts = RestartMessages()
        self._events: list[tuple[str, str]] = []
        self._policy, self._seed, self._device, self._on_reset = policy, seed, device, on_reset

    @property
    def spec(self) -> EnvSpec:
        return self.groups[0].spec

    @property
    def exact(self) -> bool:
        """Whether all groups can be saved."""
        return all(group.state() is not None for group in self.groups)

    def note(self, restarts: Sequence[str]) -> None:
        """Count replaced simulators (``TimeStep.restarts``); ``RestartMessages`` says which become events."""
        self._events += [("simulator restarted", message) for message in self._restarts.told(restarts)]

    def fields(self) -> dict[str, int]:
        """``simulator_restarts``, once there are any."""
        return {"simulator_restarts": self._restarts.count} if self._restarts.count else {}

    def events(self) -> list[tuple[str, str]]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def start(self, batches: int) -> list[Tensor]:
        """Begin new episodes, seeded by the number of batches so far; returns each group's observations."""
        return [self._reset(g, batches) for g in range(len(self.groups))]

    def fresh_start(self, batches: int) -> list[Tensor]:
        """Like ``start``, but with a new generator of actions."""
        purpose = f"actions after batch {batches}"
        self.generator = derive_generator(self._seed, purpose, device=self._device)
        return self.start(batches)

    def _reset(self, g: int, batches: int) -> Tensor:
        group, part = self.groups[g], self.parts[g]
        step = group.reset(derive_seed(self._seed, "games", batches))
        self.note(step.restarts)
        self.first[part] = True
        memory = self._policy.initial_memory(group.size)
        # without a graph, which would grow where the memory is copied: an initial memory may be learned
        self.memory[g] = None if memory is None else memory.detach()
        self._on_reset(part.start, group.size)
        return step.observation

    def joined_memory(self) -> Tensor | None:
        """[size, M]: the recurrent state of all groups; None if the agent is not recurrent."""
        memory = [part for part in self.memory if part is not None]
        return torch.cat(memory) if memory else None

    def state(self, observation: Tensor) -> dict[str, Any]:
        """The state, with the current observations; a group that cannot be saved is None in it."""
        memory = self.joined_memory()
        return {
            "groups": [group.state() for group in self.groups],
            "generator": self.generator.get_state(),
            "observation": observation.cpu().clone(),
            "first": self.first.clone(),
            "memory": None if memory is None else memory.cpu().clone(),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a state of other groups."""
        if len(state["groups"]) != len(self.groups) or len(state["first"]) != self.size:
            raise ValueError(
                f"the state is of {len(state['first'])} simulators in {len(state['groups'])} groups, "
                f"these are {self.size} in {len(self.groups)}"
            )

    def load(self, state: dict[str, Any], batches: int) -> list[Tensor]:
        """Continue from ``state``; returns each group's observations. Groups that could not be saved begin
        new episodes, with new seeds."""
        self.check_state(state)
        restore_generator(self.generator, state["generator"])
        self.first = state["first"].clone()
        observations = []
        for g, (group, part, saved) in enumerate(zip(self.groups, self.parts, state["groups"], strict=True)):
            if saved is None:
                observations.append(self._reset(g, batches))
                continue
            group.load(saved)
            memory = state["memory"]
            self.memory[g] = None if memory is None else memory[part].to(self._device, copy=True)
            observations.append(state["observation"][part].clone())
        return observations

    def close(self) -> None:
        for group in self.groups:
            group.close()
