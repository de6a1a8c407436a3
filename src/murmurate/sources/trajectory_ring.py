"""Trajectories in shared memory, from an actor process to its learner.

A bounded queue with one writer and one reader; the actor waits while it is full.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replica.fence import fence
from murmurate.sources.polling import Backoff
from murmurate.sources.shared_ring import EPISODE_NUMBERS, read_episodes, write_episodes
from murmurate.spec import EnvSpec, Episode, Shapes, Trajectory

_LINE_CELLS = 8  # int64 values in a cache line
_ALIGNMENT = 64
_MICROSECONDS = 1e6
Field = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class TrajectoryShape:
    """steps, size: T and B of a trajectory. memory: size of one simulator's recurrent state; 0 for none.
    behaviour: see ``spec.Rollouts``."""

    spec: EnvSpec
    steps: int
    size: int
    memory: int
    behaviour: Shapes

    def fields(self) -> dict[str, Field]:
        """Shapes and dtypes of what a slot holds, by name."""
        spec, steps, size = self.spec, self.steps, self.size
        observation_shape, dtype = spec.observation_shape, spec.observation_dtype
        action: Field = ((steps, size), torch.int64)
        if not spec.actions:
            action = ((steps, size, *spec.action_shape), torch.float32)
        flag: Field = ((steps, size), torch.bool)
        return {
            "observation": ((steps, size, *observation_shape), dtype),
            "last_observation": ((size, *observation_shape), dtype),
            # of which the first K rows are used; ``header`` has K
            "truncated_observation": ((steps * size, *observation_shape), dtype),
            "action": action,
            "reward": ((steps, size), torch.float32),
            "terminated": flag,
            "truncated": flag,
            "first": flag,
            "memory": ((size, self.memory), torch.float32),
            "episodes": ((steps * size, EPISODE_NUMBERS), torch.float64),
            "header": ((3,), torch.int64),  # version, number of episodes, K (truncated steps)
            **{
                f"behaviour.{n}": ((steps, size, *shape), torch.float32)
                for n, shape in self.behaviour.items()
            },
        }

    @property
    def slot_bytes(self) -> int:
        return sum(_aligned(_field_bytes(field)) for field in self.fields().values())


@dataclass
class QueuedTrajectory:
    """A trajectory, the episodes that ended in it, and the version of the parameters it was made with."""

    data: Trajectory
    episodes: Sequence[Episode]
    version: int


class TrajectoryRing:
    """At most ``slots`` trajectories that wait for the learner."""

    def __init__(self, memory_file: SharedMemoryFile, shape: TrajectoryShape, slots: int) -> None:
        # trajectories put, trajectories taken, steps of the actor, microseconds for which it waited for room,
        # simulators that it replaced
        self._counters = memory_file.counters("counters", (5, _LINE_CELLS))[:, 0]
        # all in one region, because each region takes a file descriptor
        region = memory_file.take("trajectories", slots * shape.slot_bytes)
        self._slots: list[dict[str, Tensor]] = []
        offset = 0
        for _ in range(slots):
            slot = {}
            for name, field in shape.fields().items():
                slot[name] = _view(region, offset, field)
                offset += _aligned(_field_bytes(field))
            self._slots.append(slot)
        self._has_memory = shape.memory > 0
        self._lock = threading.Lock()
        self._backoff = Backoff()

    @property
    def waiting_records(self) -> int:
        return int(self._counters[0] - self._counters[1])

    @property
    def beats(self) -> int:
        """The actor's steps so far."""
        return int(self._counters[2])

    @property
    def full_seconds(self) -> float:
        """Time for which the actor waited for room, so far."""
        return int(self._counters[3]) / _MICROSECONDS

    @property
    def restarts(self) -> int:
        """Simulators that the actor replaced because they had failed, so far."""
        return int(self._counters[4])

    # -- used by the actor --------------------------------------------------------------------------

    def beat(self) -> None:
        self._counters[2] += 1

    def set_restarts(self, count: int) -> None:
        self._counters[4] = count

    def wait_for_room(self) -> None:
        while self.waiting_records >= len(self._slots):
            self._counters[3] += int(self._backoff.sleep() * _MICROSECONDS)
        self._backoff.reset()

    def put(self, data: Trajectory, episodes: Sequence[Episode], version: int) -> None:
        """Append a trajectory. To be called after ``wait_for_room``."""
        slot = self._slots[int(self._counters[0]) % len(self._slots)]
        for name, tensor in slot.items():
            value = getattr(data, name, None)
            if name == "truncated_observation" and value is not None:
                tensor[: len(value)].copy_(value)
            elif isinstance(value, Tensor):
                tensor.copy_(value)
        for name, value in data.behaviour.items():
            slot[f"behaviour.{name}"].copy_(value)
        final = data.truncated_observation
        slot["header"].copy_(torch.tensor([version, len(episodes), 0 if final is None else len(final)]))
        write_episodes(episodes, slot["episodes"])
        fence(self._lock)
        self._counters[0] += 1

    # -- used by the learner ------------------------------------------------------------------------

    def oldest(self) -> QueuedTrajectory:
        """The oldest trajectory, as views that are valid until ``drop``. Requires ``waiting_records`` > 0."""
        fence(self._lock)
        slot = self._slots[int(self._counters[1]) % len(self._slots)]
        version, ended, truncated = slot["header"].tolist()
        episodes = read_episodes(slot["episodes"][:ended])
        data = Trajectory(
            observation=slot["observation"],
            action=slot["action"],
            reward=slot["reward"],
            terminated=slot["terminated"],
            truncated=slot["truncated"],
            first=slot["first"],
            last_observation=slot["last_observation"],
            truncated_observation=slot["truncated_observation"][:truncated] if truncated else None,
            memory=slot["memory"] if self._has_memory else None,
            behaviour={n.partition(".")[2]: x for n, x in slot.items() if n.startswith("behaviour.")},
        )
        return QueuedTrajectory(data, episodes, version)

    def drop(self) -> None:
        """Free the oldest trajectory's slot."""
        fence(self._lock)
        self._counters[1] += 1


def _field_bytes(field: Field) -> int:
    shape, dtype = field
    return math.prod(shape) * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(region: memoryview, offset: int, field: Field) -> Tensor:
    shape, dtype = field
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(region, dtype=dtype, count=count, offset=offset).view(shape)
