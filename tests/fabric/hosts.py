"""Members of the processes fabric that die and are started again, by hand: no processes, no luck."""

from __future__ import annotations

import os

import torch

from murmurate.fabric.processes.fabric import ProcessChannel, ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile

N = 5


class Host:
    """A file of shared memory and a run state, and fabrics on them as processes would have them."""

    def __init__(self, size: int) -> None:
        self._memory_file = SharedMemoryFile.create()
        self.size = size
        self.run_state = self._run_state(self._memory_file)
        self.run_state.open()

    def _run_state(self, memory_file: SharedMemoryFile) -> RunState:
        return RunState(self.size, memory_file.counters("run_state", (RunState.cells_needed(self.size),)))

    def member(
        self, rank: int, joins: bool = False, by_agreement: bool = False
    ) -> tuple[ProcessFabric, ProcessChannel]:
        memory_file = SharedMemoryFile(os.dup(self._memory_file.descriptor))
        fabric = ProcessFabric(memory_file, self._run_state(memory_file), rank, 20.0, joins, by_agreement)
        channel = fabric.channel("model", torch.zeros(N))
        memory_file.close()
        return fabric, channel

    def close(self) -> None:
        self._memory_file.close()


def full(value: float) -> torch.Tensor:
    return torch.full((N,), value)


def rebirth(host: Host, rank: int, by_agreement: bool = False) -> tuple[ProcessFabric, ProcessChannel]:
    host.run_state.mark_dead(rank)
    host.run_state.begin_incarnation(rank)
    made = host.member(rank, joins=True, by_agreement=by_agreement)
    made[0].membership.run_state.mark_ready(rank)
    host.run_state.revive(rank)
    return made
