"""The replay manager: a sum tree with one sample and one update per cycle, and storage for rows."""

from __future__ import annotations

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.data import StructLayout
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.wiring import In, Out

from murmurate.fpga.memory import LaneMemory
from murmurate.fpga.sampler import LevelSampler, Multiplier
from murmurate.fpga.shape import MULTIPLY_CYCLES, UNIFORM_BITS, TreeShape
from murmurate.fpga.updater import LevelUpdater


class ReplayManager(wiring.Component):
    """Takes streams of random numbers and of new priorities, and returns a stream of indices; valid and ready
    as in AXI.

    samples: uniform random numbers of ``UNIFORM_BITS`` bits. indices: for each number, in order, the index
    that it selects by prefix sum, and ``found``: whether there was a positive priority; with ``row_bits``,
    also the row of the index. Without updates in flight the index is exactly that of ``SumTree.find``. While
    updates are in flight, some sums on the way to the leaf contain them and others do not; but no index is
    returned whose priority was zero when it was read.

    updates: an index and its new priority (and row); always ready. total: the sum of all priorities,
    including all updates that have arrived.

    Sampler and updater each have a copy of the sums, so that both run in every cycle.
    """

    def __init__(self, shape: TreeShape, row_bits: int = 0) -> None:
        self.shape, self.row_bits = shape, row_bits
        update = {"index": shape.index_bits, "priority": shape.width}
        index = {"index": shape.index_bits, "found": 1}
        if row_bits:
            update["row"] = index["row"] = row_bits
        super().__init__(
            {
                "samples": In(stream.Signature(UNIFORM_BITS)),
                "indices": Out(stream.Signature(StructLayout(index))),
                "updates": In(stream.Signature(StructLayout(update))),
                "total": Out(shape.total_bits),
            }
        )

    @property
    def sample_latency(self) -> int:
        """Cycles from an accepted sample to its index, and with ``row_bits`` to its row."""
        return self.shape.sample_latency + (self.shape.row_cycles if self.row_bits else 0)

    @property
    def memory_bits(self) -> int:
        """Memory bits of all sums and rows."""
        return self.shape.memory_bits + self.shape.leaves * self.row_bits

    def elaborate(self, platform: object) -> Module:
        m, shape = Module(), self.shape
        updaters = self._connected_updaters(m)
        m.submodules.multiplier = multiplier = Multiplier(shape.total_bits)
        m.d.comb += [multiplier.uniform.eq(self.samples.payload), multiplier.total.eq(self.total)]
        depth = self.sample_latency + 2
        m.submodules.output = output = SyncFIFOBuffered(
            width=len(self.indices.payload.as_value()), depth=depth
        )
        # free places of the output queue that no sample in flight will need
        room = Signal(range(depth + 1), init=depth)
        accepted, left = Signal(), Signal()
        m.d.comb += [
            self.samples.ready.eq(room != 0),
            accepted.eq(self.samples.valid & self.samples.ready),
            left.eq(self.indices.valid & self.indices.ready),
        ]
        m.d.sync += room.eq(room - accepted + left)

        valid: Signal = accepted
        for stage in range(MULTIPLY_CYCLES):
            later = Signal(name=f"valid_{stage}")
            m.d.sync += later.eq(valid)
            valid = later
        found = Signal(init=1)
        m.d.comb += found.eq(1)
        node, mass = None, multiplier.mass
        for level, updater in enumerate(updaters):
            sampler = LevelSampler(shape, level)
            m.submodules[f"sampler_{level}"] = sampler
            m.d.comb += [
                sampler.valid.eq(valid),
                sampler.found.eq(found),
                sampler.mass.eq(mass),
                sampler.write_enable.eq(updater.write_enable),
                sampler.write_address.eq(updater.write_address),
                sampler.write_data.eq(updater.write_data),
            ]
            if node is not None:
                m.d.comb += sampler.node.eq(node)
            valid, found, node, mass = (
                sampler.next_valid,
                sampler.next_found,
                sampler.next_node,
                sampler.next_mass,
            )
        index: Signal = node
        entry = self.indices.payload.shape()(output.w_data)
        if self.row_bits:
            m.submodules.rows = rows = LaneMemory(self.shape.leaves, 1, self.row_bits, bypass=True)
            m.d.comb += rows.read_address.eq(index)
            for stage in range(shape.row_cycles):
                later = [
                    Signal(len(x), name=f"{n}_{stage}")
                    for x, n in ((valid, "rv"), (found, "rf"), (index, "ri"))
                ]
                m.d.sync += [a.eq(b) for a, b in zip(later, (valid, found, index), strict=True)]
                valid, found, index = later
            m.d.comb += [
                rows.write_enable.eq(self.updates.valid),
                rows.write_address.eq(self.updates.payload.index),
                rows.write_data.eq(self.updates.payload.row),
                entry.row.eq(rows.read_data),
            ]
        m.d.comb += [
            entry.index.eq(index),
            entry.found.eq(found),
            output.w_en.eq(valid),
            self.indices.payload.as_value().eq(output.r_data),
            self.indices.valid.eq(output.r_rdy),
            output.r_en.eq(left),
        ]
        return m

    def _connected_updaters(self, m: Module) -> list[LevelUpdater]:
        """The updaters by level, from the root down, connected from the leaves up."""
        shape = self.shape
        updaters = [LevelUpdater(shape, level) for level in range(shape.levels)]
        payload = self.updates.payload
        valid, index, delta = self.updates.valid, payload.index, payload.priority
        for level in reversed(range(shape.levels)):
            updater = updaters[level]
            m.submodules[f"updater_{level}"] = updater
            m.d.comb += [updater.valid.eq(valid), updater.index.eq(index), updater.delta.eq(delta)]
            valid, index, delta = updater.next_valid, updater.next_index, updater.next_delta
        m.d.comb += self.updates.ready.eq(1)
        m.d.sync += self.total.eq(Mux(valid, self.total + delta, self.total))
        return updaters
