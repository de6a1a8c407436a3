"""Finds a leaf by prefix sum, from the root down, one sample per cycle (Zhang 2022, Algorithm 3)."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from murmurate.fpga.memory import LaneMemory
from murmurate.fpga.shape import BYPASS_CYCLES, UNIFORM_BITS, TreeShape


class Multiplier(wiring.Component):
    """mass = (uniform * total) >> UNIFORM_BITS, in ``shape.MULTIPLY_CYCLES`` cycles: a tree of adders with a
    register after each. An ECP5's multipliers are not used, as nextpnr's timing leaves out their registers,
    so that they would limit the clock."""

    def __init__(self, total_bits: int) -> None:
        self.total_bits = total_bits
        super().__init__({"uniform": In(UNIFORM_BITS), "total": In(total_bits), "mass": Out(total_bits)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        uniform, total = Signal(UNIFORM_BITS, reset_less=True), Signal(self.total_bits, reset_less=True)
        m.d.sync += [uniform.eq(self.uniform), total.eq(self.total)]
        terms: list[Value] = [Mux(bit, total, 0) for bit in uniform]
        distance, stage = 1, 0  # distance: by how many bits each term is shifted against the one before
        while len(terms) > 1:
            sums: list[Value] = []
            for k in range(0, len(terms), 2):
                value = terms[k] + (terms[k + 1] << distance) if k + 1 < len(terms) else terms[k]
                bits = self.total_bits + min(2 * distance, UNIFORM_BITS - k * distance)
                sums.append(Signal(bits, name=f"sum_{stage}_{k // 2}", reset_less=True))
                m.d.sync += sums[-1].eq(value)
            terms, distance, stage = sums, 2 * distance, stage + 1
        m.d.comb += self.mass.eq(terms[0] >> UNIFORM_BITS)
        return m


class LevelSampler(wiring.Component):
    """Finds, among the children of a node, the one whose range of prefix sums contains the mass, and the mass
    relative to the start of that range.

    Its outputs appear ``shape.sample_level_cycles(level)`` cycles after the node, ``next_mass`` two later.

    While updates are in flight, a node's sum may differ from its children's. If the mass lies above all
    children, the last nonzero child is chosen; if all children are zero, ``found`` is unset.
    """

    def __init__(self, shape: TreeShape, level: int) -> None:
        self.shape, self.level = shape, level
        lanes, words = shape.lanes(level), shape.words(level)
        self.node_bits = words.bit_length() - 1
        self.lane_bits = lanes.bit_length() - 1
        self.width = shape.lane_width(level)
        self.mass_bits = shape.total_bits if level == 0 else shape.lane_width(level - 1)
        super().__init__(
            {
                "valid": In(1),
                "found": In(1),
                "node": In(self.node_bits),
                "mass": In(self.mass_bits),  # two cycles after the node, at all levels but the first
                "next_valid": Out(1),
                "next_found": Out(1),
                "next_node": Out(self.node_bits + self.lane_bits),
                "next_mass": Out(self.width),
                "write_enable": In(lanes),
                "write_address": In(max(1, (words - 1).bit_length())),
                "write_data": In(self.width),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m, lanes = Module(), self.shape.lanes(self.level)
        m.submodules.memory = memory = LaneMemory(
            self.shape.words(self.level), lanes, self.width, bypass=True
        )
        m.d.comb += [
            memory.read_address.eq(self.node),
            memory.write_enable.eq(self.write_enable),
            memory.write_address.eq(self.write_address),
            memory.write_data.eq(self.write_data),
        ]
        read = self.shape.read_cycles(self.level)
        stages = read + BYPASS_CYCLES + self.lane_bits + 2
        valid, found, node = self.valid, self.found, self.node
        mass: Value = self.mass
        for stage in range(stages):
            valid, found, node = (
                self._later(m, x, f"{n}_{stage}") for x, n in ((valid, "v"), (found, "f"), (node, "n"))
            )
        for stage in range(read + BYPASS_CYCLES + self.lane_bits - 2 * (self.level > 0)):
            mass = self._later(m, mass, f"mass_{stage}")

        # prefix sums by Kogge and Stone 1973: after log2(K) stages sums[k] is the sum of lanes 0 to k
        bits = self.width + self.lane_bits
        sums: list[Value] = [memory.read_data.word_select(k, self.width) for k in range(lanes)]
        nonzero: Value = Cat(lane.any() for lane in sums)
        for stage in range(self.lane_bits):
            step = 1 << stage
            added = [Signal(bits, name=f"sum_{stage}_{k}") for k in range(lanes)]
            m.d.sync += [
                added[k].eq(sums[k] + sums[k - step] if k >= step else sums[k]) for k in range(lanes)
            ]
            sums, nonzero = list(added), self._later(m, nonzero, f"nonzero_{stage}")

        # beyond[k]: the mass is at least sums[k], so lane k is not the child
        beyond, present = Signal(lanes), self._later(m, nonzero, "present")
        m.d.sync += beyond.eq(Cat(mass >= total for total in sums))
        kept_sums = [self._later(m, total, f"kept_{k}") for k, total in enumerate(sums)]
        kept_mass = self._later(m, mass, "kept_mass")

        # child: the first whose sum is above the mass; last: the last that is not zero
        child: Value = Signal(self.lane_bits)
        last: Value = Signal(self.lane_bits)
        for k in range(1, lanes):
            child = Mux(beyond[k - 1], k, child)
            last = Mux(present[k], k, last)
        chosen = Signal(self.lane_bits)
        m.d.sync += chosen.eq(Mux(beyond[lanes - 1], last, child))
        # the sum before the chosen child is taken from the mass, which waited for the choice
        before = Array([0, *(self._later(m, total, f"before_{k}") for k, total in enumerate(kept_sums[:-1]))])
        taken, left = Signal(self.mass_bits), Signal(self.width)
        waiting = self._later(m, self._later(m, kept_mass, "mass_of_choice"), "mass_of_taken")
        m.d.sync += [taken.eq(before[chosen]), left.eq(waiting - taken)]
        m.d.comb += [
            self.next_valid.eq(valid),
            self.next_found.eq(found & self._later(m, present.any(), "any")),
            self.next_node.eq(Cat(chosen, node)),
            self.next_mass.eq(left),
        ]
        return m

    @staticmethod
    def _later(m: Module, value: Value, name: str) -> Signal:
        """``value`` one cycle later. A reset clears it only if it is a valid bit (named "v_...")."""
        later = Signal(value.shape(), name=name, reset_less=not name.startswith("v_"))
        m.d.sync += later.eq(value)
        return later
