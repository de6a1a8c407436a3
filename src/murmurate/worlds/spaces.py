"""What a learner and its actors share: parameters one way, steps the other, in anonymous memory.

The learner's parameters are a register: an actor reads the newest whole version, and nobody waits. Steps are
a ring for each actor with one writer and one reader; a full one stops its actor, and that is how a learner
that is behind holds its actors back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from murmurate.fabric.processes.shared_memory import SharedMemoryFile, fence
from murmurate.replay.interface import Steps
from murmurate.spec import EnvSpec, Episode

SLOTS = 4  # records an actor may be ahead of its learner
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-4, 2e-3
_LINE = 8  # int64 in a cache line
_KINDS = (torch.uint8, torch.int64, torch.float32, torch.float64, torch.bool)
_NUMPY = {kind: torch.empty(0, dtype=kind).numpy().dtype for kind in _KINDS}


class Weights:
    """[N] float32 parameters with a version. One writes, any number read."""

    def __init__(self, memory_file: SharedMemoryFile, count: int) -> None:
        # a writer raises the first number, writes, and then the second; the third is the version
        self._marks = memory_file.counters("marks", (3, _LINE))[:, 0]
        self._values = memory_file.tensors("parameters", (count,), torch.float32)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def version(self) -> int:
        """Of the newest parameters; 0 before the first."""
        return int(self._marks[2])

    def publish(self, x: Tensor, version: int) -> None:
        self._marks[0] += 1
        fence(self._lock)
        self._values.copy_(x)
        self._marks[2] = version
        fence(self._lock)
        self._marks[1] = self._marks[0]

    def read(self, into: Tensor) -> int:
        """Copies the newest whole version; returns its number."""
        while True:
            seen = int(self._marks[1])
            fence(self._lock)
            into.copy_(self._values)
            version = self.version
            fence(self._lock)
            if int(self._marks[0]) == seen:
                return version


@dataclass
class Record:
    """One step of an actor's simulators, the games that ended with it, and what it was played with."""

    steps: Steps
    episodes: list[Episode]
    version: int


class Ring:
    """``SLOTS`` records of ``size`` simulators of a world; one process puts, one takes."""

    def __init__(self, memory_file: SharedMemoryFile, spec: EnvSpec, size: int) -> None:
        self._marks = memory_file.counters("marks", (2, _LINE))[:, 0]  # put, taken
        # one region, as each takes a descriptor
        fields = [(name, _NUMPY[kind], shape) for name, (shape, kind) in _shapes(spec, size).items()]
        record = np.dtype(fields, align=True)
        records = np.frombuffer(memory_file.take("records", SLOTS * record.itemsize), record)
        self._slots = [
            {name: torch.from_numpy(records[name][slot]) for name, *_ in fields} for slot in range(SLOTS)
        ]
        self._steps = [Steps(*(slot[name] for name in Steps._fields)) for slot in self._slots]
        self._lock = threading.Lock()
        self._rests = False

    @property
    def waiting(self) -> int:
        """Records that were put and not yet taken."""
        return int(self._marks[0] - self._marks[1])

    @property
    def has_room(self) -> bool:
        """Whether a record may be put. Once full, only when half of it is free again: then who fills it does
        several records at a time, and leaves the core alone in between."""
        waiting = self.waiting
        self._rests = waiting >= SLOTS or (self._rests and waiting > SLOTS // 2)
        return not self._rests

    def put(self, record: Record) -> None:
        """The caller has seen that it ``has_room``."""
        slot = self._slots[int(self._marks[0]) % SLOTS]
        for name, value in record.steps._asdict().items():
            if value is not None:
                slot[name].copy_(value)
        has_values = record.steps.taken is not None
        slot["about"].copy_(torch.tensor([record.version, len(record.episodes), has_values]))
        for k, episode in enumerate(record.episodes):
            slot["episodes"][k] = torch.tensor(
                [episode.simulator, episode.episode_return, episode.length], dtype=torch.float64
            )
        fence(self._lock)
        self._marks[0] += 1

    def oldest(self) -> Record:
        """The oldest record, where it lies: until ``drop``. The caller has seen that there is one."""
        fence(self._lock)
        number = int(self._marks[1]) % SLOTS
        slot, steps = self._slots[number], self._steps[number]
        version, ended, has_values = slot["about"].tolist()
        if not has_values:
            steps = steps._replace(taken=None, following=None)
        episodes = [Episode(int(s), r, int(n)) for s, r, n in slot["episodes"][:ended].tolist()]
        return Record(steps, episodes, version)

    def drop(self) -> None:
        """The oldest record's place may be written again."""
        fence(self._lock)
        self._marks[1] += 1


class Pauses:
    """Sleeps of one who looks again and again. They double, and the first is half of what it took last time:
    who sleeps does not take the core, and what is in its caches, from the one that is waited for."""

    def __init__(self) -> None:
        self._seconds, self._slept = _SHORTEST_SECONDS, 0.0

    def sleep(self) -> None:
        time.sleep(self._seconds)
        self._slept += self._seconds
        self._seconds = min(2 * self._seconds, _LONGEST_SECONDS)

    def over(self) -> None:
        """There was something."""
        self._seconds = min(max(self._slept / 2, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        self._slept = 0.0


def give_way() -> None:
    """From now on this process does not interrupt who is running on a core when it wakes up: its turn comes,
    and is as long. Two learners that share two cores with four actors draw a third more for it."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:  # nobody chose another
        with contextlib.suppress(OSError):  # where that is forbidden
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _shapes(spec: EnvSpec, size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    seen = ((size, *spec.observation_shape), spec.observation_dtype)
    action = ((size,), torch.int64) if spec.actions else ((size, *spec.action_shape), torch.float32)
    number, flag = ((size,), torch.float32), ((size,), torch.bool)
    return {
        "observation": seen,
        "action": action,
        "reward": number,
        "next_observation": seen,
        "terminated": flag,
        "truncated": flag,
        "taken": number,
        "following": number,
        "about": ((3,), torch.int64),
        "episodes": ((size, 3), torch.float64),
    }
