"""The shape of a K-ary sum tree in hardware, and how many cycles its operations take. Nothing here needs
Amaranth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from murmurate.errors import Refusal

READ_CYCLES = 2  # cycles from an address to the data at the memory's output register
BYPASS_CYCLES = 1  # extra cycle of memories that return data written in the cycle of the read
FAR_WORDS = 4_096  # memories of this many words or more are spread out: their inputs have an extra register
SUM_CYCLES = 3  # cycles to select the lane, take a newer sum, and add
# bits of a random number: a leaf below total / 2^24 may have no mass, and then is never drawn
UNIFORM_BITS = 24
MOST_LEAVES = 1 << 20  # the simulation holds each word of each memory; the largest ECP5 has no room for 2^17
# cycles of a multiplication: one for its inputs, then one for each level of a tree of adders
MULTIPLY_CYCLES = 1 + (UNIFORM_BITS - 1).bit_length()
OUTPUT_CYCLES = 2  # cycles through the buffered output queue


def read_cycles(words: int) -> int:
    """Cycles from an address to the data, in a memory of ``words`` words."""
    return READ_CYCLES + (words >= FAR_WORDS)


@dataclass(frozen=True)
class TreeShape:
    """A tree of N leaves of ``width`` bits, whose nodes have K children.

    Level 0 has the root's children, level ``levels`` - 1 the leaves. A level is a memory with one word for
    each node of the level above; a word has one lane for the sum of each child. Sums are unsigned and exact:
    a lane has as many bits as the sum of its leaves may need. If log2(N) is no multiple of log2(K), the root
    has fewer children.

    Raises Refusal if N or K is no power of two, N is above ``MOST_LEAVES``, ``width`` is not from 2 to 32, or
    the tree has fewer than two levels.
    """

    leaves: int
    fan_out: int = 4
    width: int = 16

    def __post_init__(self) -> None:
        for name, value, usual in (("leaves", self.leaves, 4096), ("fan-out", self.fan_out, 4)):
            if value < 2 or value & (value - 1):
                raise Refusal(
                    f"{name} is {value}, and hardware needs a power of two from 2 on. Use {usual}, say."
                )
        if self.leaves > MOST_LEAVES:
            raise Refusal(f"{self.leaves} leaves, one for each transition; use {MOST_LEAVES} at most.")
        if not 2 <= self.width <= 32:
            raise Refusal(f"width is {self.width} bits; a priority has 2 to 32.")
        if self.leaves <= self.fan_out:
            raise Refusal(
                f"{self.leaves} leaves fit in one node of {self.fan_out} children, which is no tree. Use "
                f"{2 * self.fan_out} leaves at least{' or a smaller fan-out' * (self.leaves > 2)}."
            )

    @property
    def index_bits(self) -> int:
        return self.leaves.bit_length() - 1

    @property
    def lane_bits(self) -> int:
        """Bits that select one of K lanes: log2(K)."""
        return self.fan_out.bit_length() - 1

    @property
    def levels(self) -> int:
        return math.ceil(self.index_bits / self.lane_bits)

    @property
    def total_bits(self) -> int:
        """Bits of the sum of all leaves."""
        return self.width + self.index_bits

    def lanes(self, level: int) -> int:
        below = self.lane_bits * (self.levels - 1)
        return 1 << (self.index_bits - below if level == 0 else self.lane_bits)

    def bits_below(self, level: int) -> int:
        """Number of low bits of a leaf's index that select its path below this level."""
        return self.lane_bits * (self.levels - 1 - level)

    def words(self, level: int) -> int:
        return self.leaves >> (self.bits_below(level) + self.lanes(level).bit_length() - 1)

    def lane_width(self, level: int) -> int:
        return self.width + self.bits_below(level)

    @property
    def memory_bits(self) -> int:
        """Memory bits of all levels; each level has one copy for samples and one for updates."""
        return 2 * sum(
            self.words(level) * self.lanes(level) * self.lane_width(level) for level in range(self.levels)
        )

    def read_cycles(self, level: int) -> int:
        """Cycles from an address to the data of this level."""
        return read_cycles(self.words(level))

    def update_level_cycles(self, level: int) -> int:
        return self.read_cycles(level) + SUM_CYCLES

    def sample_level_cycles(self, level: int) -> int:
        """Cycles to read, form prefix sums (log2(K) stages), compare, and choose the child."""
        return self.read_cycles(level) + BYPASS_CYCLES + (self.lanes(level).bit_length() - 1) + 2

    @property
    def sample_latency(self) -> int:
        """Cycles from an accepted random number to its index at the output."""
        descent = sum(self.sample_level_cycles(level) for level in range(self.levels))
        return MULTIPLY_CYCLES + descent + OUTPUT_CYCLES

    @property
    def row_cycles(self) -> int:
        """Cycles from an index to its row, where rows are stored."""
        return read_cycles(self.leaves) + BYPASS_CYCLES

    @property
    def update_latency(self) -> int:
        """Cycles from an accepted priority to the total that contains it."""
        return sum(self.update_level_cycles(level) for level in range(self.levels)) + 1
