"""The replay manager in Amaranth's cycle-accurate simulator, driven from Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from murmurate.errors import Refusal
from murmurate.fpga.shape import TreeShape

PERIOD_SECONDS = 1e-8  # period of the simulated clock; its value does not matter, as only cycles are counted


class SimulatedManager:
    """A ``ReplayManager`` with a simulated clock.

    row_bits: bits of the row that is stored with each leaf; 0 for no rows. cycles: how many were simulated so
    far. An index is below ``shape.leaves``, a priority has ``shape.width`` bits, a random number
    ``shape.UNIFORM_BITS``; of larger numbers the upper bits are dropped.

    Raises Refusal if Amaranth is not installed.
    """

    def __init__(self, shape: TreeShape, row_bits: int = 0) -> None:
        try:
            from amaranth.sim import Simulator

            from murmurate.fpga.manager import ReplayManager
        except ImportError as error:
            raise Refusal(
                "simulating an FPGA needs Amaranth. Install murmurate[fpga]: pip install 'murmurate[fpga]'."
            ) from error
        self.shape, self.row_bits = shape, row_bits
        self.cycles = 0
        self.dut = ReplayManager(shape, row_bits)
        self._updates: deque[tuple[int, int, int]] = deque()
        self._samples: deque[int] = deque()
        self._indices: list[tuple[int, bool, int]] = []
        self._total = 0
        self._simulator = Simulator(self.dut)
        self._simulator.add_clock(PERIOD_SECONDS)
        self._simulator.add_testbench(self._drive, background=True)
        self._until = 0  # cycle at which the simulation pauses

    async def _drive(self, context: Any) -> None:
        dut = self.dut
        context.set(dut.indices.ready, 1)
        while True:
            context.set(dut.updates.valid, bool(self._updates))
            if self._updates:
                index, priority, row = self._updates.popleft()
                context.set(dut.updates.payload.index, index)
                context.set(dut.updates.payload.priority, priority)
                if self.row_bits:
                    context.set(dut.updates.payload.row, row)
            context.set(dut.samples.valid, bool(self._samples))
            if self._samples:
                context.set(dut.samples.payload, self._samples[0])
                if context.get(dut.samples.ready):
                    self._samples.popleft()
            if context.get(dut.indices.valid):
                entry = context.get(dut.indices.payload)
                self._indices.append((entry.index, bool(entry.found), entry.row if self.row_bits else 0))
            self._total = context.get(dut.total)
            await context.tick()
            self.cycles += 1

    @property
    def total(self) -> int:
        """The sum of all priorities, in the last simulated cycle."""
        return self._total

    def _run(self, cycles: int) -> None:
        self._until += cycles
        self._simulator.run_until(self._until * PERIOD_SECONDS)

    def update(self, indices: Sequence[int], priorities: Sequence[int], rows: Sequence[int] = ()) -> None:
        """Set priorities (and rows, by default 0), one per cycle, and wait until the total contains them.

        Raises ValueError for sequences of different lengths.
        """
        self._updates.extend(zip(indices, priorities, rows or [0] * len(indices), strict=True))
        self._run(len(indices) + self.shape.update_latency + 1)

    def sample(self, uniforms: Sequence[int]) -> list[tuple[int, bool, int]]:
        """(index, found, row) for each random number; see ``ReplayManager``."""
        return self.run((), uniforms)

    def run(
        self, updates: Sequence[tuple[int, int, int]], uniforms: Sequence[int]
    ) -> list[tuple[int, bool, int]]:
        """Start an update (index, priority, row) and a sample in each cycle; returns (index, found, row) of
        every sample, after all updates and samples have finished."""
        self._updates.extend(updates)
        self._samples.extend(uniforms)
        self._indices.clear()
        update_cycles = len(updates) + self.shape.update_latency + 1 if updates else 0
        sample_cycles = len(uniforms) + self.dut.sample_latency if uniforms else 0
        self._run(max(update_cycles, sample_cycles))
        while len(self._indices) < len(uniforms):
            self._run(1)
        return list(self._indices)
