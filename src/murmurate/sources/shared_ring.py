"""Shared memory between a learner and its actors: parameters in one direction, steps in the other.

The learner's parameters are a register: an actor reads the newest complete version without waiting. Each
actor has a ring of steps with a single producer and a single consumer; an actor waits while its ring is full.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replay.interface import Steps
from murmurate.replica.fence import fence
from murmurate.spec import EnvSpec, Episode, Shapes
from murmurate.worlds.figures import LONGEST_NAME, MOST_FIGURES

SLOTS = 4  # steps by which an actor may be ahead of its learner
_PLAIN = 4  # float64 values of an episode: simulator, return, length, success; its figures follow
_NAMES = _PLAIN + MOST_FIGURES  # where the figures' names begin, as text
_NAME_BYTES = MOST_FIGURES * (LONGEST_NAME + 1)
EPISODE_NUMBERS = _NAMES + _NAME_BYTES // 8  # what an episode takes, as float64 values
_UNKNOWN = -1.0  # success, if the world does not say
_LINE = 8  # int64 values in a cache line
_FAILURE_BYTES = 4_000  # of the sentence with which an actor may fail
_DTYPES = (torch.uint8, torch.int64, torch.float32, torch.float64, torch.bool)
_NUMPY_DTYPES = {dtype: torch.empty(0, dtype=dtype).numpy().dtype for dtype in _DTYPES}


class SharedParameters:
    """[N] float32 parameters with a version, for one writer and any number of readers."""

    def __init__(self, memory_file: SharedMemoryFile, count: int) -> None:
        # a sequence lock: the writer increments the first counter, writes, then sets the second to the same
        # value; the third is the version
        self._counters = memory_file.counters("counters", (3, _LINE))[:, 0]
        self._values = memory_file.tensors("parameters", (count,), torch.float32)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def version(self) -> int:
        """The version of the newest parameters; 0 before the first."""
        return int(self._counters[2])

    def publish(self, x: Tensor, version: int) -> None:
        self._counters[0] += 1
        fence(self._lock)
        self._values.copy_(x)
        self._counters[2] = version
        fence(self._lock)
        self._counters[1] = self._counters[0]

    def read(self, into: Tensor) -> int:
        """Copy the newest complete version into ``into`` [N]; returns the version."""
        while True:
            completed_writes = int(self._counters[1])
            fence(self._lock)
            into.copy_(self._values)
            version = self.version
            fence(self._lock)
            if int(self._counters[0]) == completed_writes:  # no later write has begun
                return version


class ActorFailure:
    """Why an actor failed for good, in the memory of its ring: a sentence that the actor writes before it
    ends, and its learner reads then."""

    def __init__(self, memory_file: SharedMemoryFile) -> None:
        zone = memory_file.zone("failure")  # its place does not depend on the ring's regions
        self._size = zone.counters("size", (1,))
        self._text = zone.take("text", _FAILURE_BYTES)

    def write(self, sentence: str) -> None:
        """Store ``sentence``, of which at most 4,000 bytes are kept."""
        encoded = sentence.encode()[:_FAILURE_BYTES]
        self._text[: len(encoded)] = encoded
        self._size[0] = len(encoded)

    def read(self) -> str:
        """The sentence; empty if the actor has not failed."""
        return bytes(self._text[: int(self._size[0])]).decode(errors="ignore")


@dataclass
class ActorStep:
    """One step of an actor's simulators, and the episodes that ended with it.

    version: version of the parameters that the actor used. restarts: number of simulators replaced
    in this step. incarnation: number of earlier starts of the actor's process. number: number of the step,
    which the ring assigns: 0, 1, ...
    """

    steps: Steps
    episodes: list[Episode]
    version: int
    restarts: int = 0
    incarnation: int = 0
    number: int = 0


class ActorRing:
    """``SLOTS`` steps of ``size`` simulators of a world, from one process to another."""

    def __init__(
        self, memory_file: SharedMemoryFile, spec: EnvSpec, size: int, behaviour: Shapes | None = None
    ) -> None:
        self._counters = memory_file.counters("counters", (2, _LINE))[:, 0]  # steps put, steps taken
        recorded = {f"behaviour.{name}": shape for name, shape in (behaviour or {}).items()}
        # all in one region, because each region takes a file descriptor
        fields = [
            (name, _NUMPY_DTYPES[dtype], shape)
            for name, (shape, dtype) in _fields(spec, size, recorded).items()
        ]
        record_dtype = np.dtype(fields, align=True)
        records = np.frombuffer(memory_file.take("records", SLOTS * record_dtype.itemsize), record_dtype)
        self._slots = [
            {name: torch.from_numpy(records[name][slot]) for name, *_ in fields} for slot in range(SLOTS)
        ]
        self._steps = [_steps_in(slot) for slot in self._slots]
        self._lock = threading.Lock()
        self._is_draining = False

    @property
    def waiting_records(self) -> int:
        """Number of steps that were put and not yet dropped."""
        return int(self._counters[0] - self._counters[1])

    @property
    def beats(self) -> int:
        """Number of steps that were put."""
        return int(self._counters[0])

    @property
    def taken(self) -> int:
        """Number of steps that were dropped, and so acknowledged."""
        return int(self._counters[1])

    @property
    def has_room(self) -> bool:
        """Whether a step may be put. A full ring has room once half of it is free again, so that the producer
        wakes up less often."""
        waiting = self.waiting_records
        self._is_draining = waiting >= SLOTS or (self._is_draining and waiting > SLOTS // 2)
        return not self._is_draining

    def put(self, record: ActorStep) -> None:
        """Append a step. Requires ``has_room``."""
        number = int(self._counters[0])
        slot = self._slots[number % SLOTS]
        for name, value in record.steps._asdict().items():
            if isinstance(value, Tensor):
                slot[name].copy_(value)
        for name, value in record.steps.behaviour.items():
            slot[f"behaviour.{name}"].copy_(value)
        has_values = record.steps.action_value is not None
        header = [
            record.version,
            len(record.episodes),
            has_values,
            record.restarts,
            record.incarnation,
            number,
        ]
        slot["header"].copy_(torch.tensor(header))
        write_episodes(record.episodes, slot["episodes"])
        fence(self._lock)
        self._counters[0] += 1

    def oldest(self) -> ActorStep:
        """The oldest step, as views that are valid until ``drop``. Requires ``waiting_records`` > 0."""
        fence(self._lock)
        index = int(self._counters[1]) % SLOTS
        slot, steps = self._slots[index], self._steps[index]
        version, ended, has_values, restarts, incarnation, number = slot["header"].tolist()
        if not has_values:
            steps = steps._replace(action_value=None, next_value=None)
        episodes = read_episodes(slot["episodes"][:ended])
        return ActorStep(steps, episodes, version, restarts, incarnation, number)

    def drop(self) -> None:
        """Free the oldest step's slot."""
        fence(self._lock)
        self._counters[1] += 1


def write_episodes(episodes: Sequence[Episode], rows: Tensor) -> None:
    """Write episodes into the first of ``rows`` [n, EPISODE_NUMBERS]."""
    for episode, row in zip(episodes, rows.numpy(), strict=False):
        success = _UNKNOWN if episode.success is None else episode.success
        row[:_PLAIN] = episode.simulator, episode.episode_return, episode.length, success
        values, names = row[_PLAIN:_NAMES], "\n".join(episode.figures).encode()
        values[: len(episode.figures)] = list(episode.figures.values())
        row[_NAMES:].view(np.uint8)[:] = np.frombuffer(names.ljust(_NAME_BYTES), np.uint8)


def read_episodes(rows: Tensor) -> list[Episode]:
    return [_read_episode(row) for row in rows.numpy()]


def _read_episode(row: npt.NDArray[np.float64]) -> Episode:
    simulator, episode_return, length, success = row[:_PLAIN].tolist()
    names = row[_NAMES:].tobytes().decode().split()
    return Episode(
        int(simulator),
        episode_return,
        int(length),
        None if success == _UNKNOWN else bool(success),
        dict(zip(names, row[_PLAIN:_NAMES].tolist(), strict=False)),
    )


def _steps_in(slot: dict[str, Tensor]) -> Steps:
    """A slot's tensors as ``Steps``."""
    behaviour = {n.partition(".")[2]: x for n, x in slot.items() if n.startswith("behaviour.")}
    fields = {name: slot[name] for name in Steps._fields if name != "behaviour"}
    return Steps(**fields, behaviour=behaviour)


def _fields(spec: EnvSpec, size: int, recorded: Shapes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what a slot holds, by name."""
    observation = ((size, *spec.observation_shape), spec.observation_dtype)
    action = ((size,), torch.int64) if spec.actions else ((size, *spec.action_shape), torch.float32)
    scalar, flag = ((size,), torch.float32), ((size,), torch.bool)
    return {
        "observation": observation,
        "action": action,
        "reward": scalar,
        "next_observation": observation,
        "terminated": flag,
        "truncated": flag,
        "action_value": scalar,
        "next_value": scalar,
        **{name: ((size, *shape), torch.float32) for name, shape in recorded.items()},
        "header": ((6,), torch.int64),  # see ``put``
        "episodes": ((size, EPISODE_NUMBERS), torch.float64),
    }
