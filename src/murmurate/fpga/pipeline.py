"""The learner's pipelines as hardware: FW, LOSS, BW and WA of each, the sum over them, and WU (Zhang
2022, Fig. 4.2).

It computes what ``EmulatedLearner.step`` computes, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from amaranth.hdl import Cat, Module, Signal, signed
from amaranth.lib import stream, wiring
from amaranth.lib.data import ArrayLayout, StructLayout
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out, connect

from murmurate.fpga.fixed_point import OPERAND_BITS
from murmurate.fpga.layers import LayerStages, LayerUpdate, Loss, RowMemory
from murmurate.fpga.learner import MASTER_BITS, EmulatedLearner
from murmurate.fpga.learner_model import LearnerModel, Unit, by_kind
from murmurate.fpga.stages import row_address


class LearnerPipeline(wiring.Component):
    """What ``learner`` computes in gradient steps on ``batch`` samples, as hardware, with units of the
    sizes in ``units``.

    load: the 32-bit weights of a layer, in the order of rows, the biases last; the layers in any order.
    Accepted between steps. All weights must be loaded before the first step, as memories begin with 0.
    samples: for each pipeline its share of a batch, in any rhythm: observation, action (of an output that
    there is), and target. td_errors: for each pipeline, target - Q of its samples in their order, for the
    priorities of a replay. updated: for each layer the new weights, and their 16 bits for the tensor
    units, in the order of rows; those that are loaded, too. td_errors and updated cannot be held back.
    Fractional bits are those of ``learner.numbers``.

    A step begins when the first pipeline is offered its first sample, nothing is offered to load, and no
    layer is loaded in part.

    Raises Refusal as ``EmulatedLearner.checked_shift`` does, and unless there is a unit for each of
    ``stages(learner.layers)``.
    """

    def __init__(self, learner: EmulatedLearner, units: Sequence[Unit], batch: int) -> None:
        self.learner, self.batch = learner, batch
        self.units = LearnerModel(learner.layers, tuple(units), learner.pipelines, 1.0).units
        self.shift = learner.checked_shift(batch)
        inputs, actions = learner.layers[0], learner.layers[-1]
        label = {"action": row_address(actions), "target": signed(OPERAND_BITS)}
        self.label = StructLayout(label)
        sample = StructLayout({"observation": ArrayLayout(signed(OPERAND_BITS), inputs), **label})
        loaded = StructLayout({"layer": range(max(2, len(learner.masters))), "weight": signed(MASTER_BITS)})
        updated = StructLayout({"weight": signed(MASTER_BITS), "operand": signed(OPERAND_BITS)})
        super().__init__(
            {
                "load": In(stream.Signature(loaded)),
                "samples": In(stream.Signature(sample)).array(learner.pipelines),
                "td_errors": Out(_results(signed(OPERAND_BITS + 1))).array(learner.pipelines),
                "updated": Out(_results(updated)).array(len(learner.masters)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m, learner = Module(), self.learner
        start, update, idle = Signal(), Signal(), Signal()
        share = self.batch // learner.pipelines
        pipelines = [self._pipeline(m, p, share, start, idle) for p in range(learner.pipelines)]
        updates = []
        for layer, (k, n) in enumerate(pairwise(learner.layers)):
            stochastic = learner.noises[layer] is not None
            updates.append(LayerUpdate(k, n, learner.pipelines, learner.numbers, self.shift, stochastic))
            m.submodules[f"update_{layer}"] = of_layer = updates[-1]
            out, loaded = self.updated[layer], self.load.payload
            m.d.comb += [
                of_layer.start.eq(update),
                of_layer.load.eq(self.load.valid & idle & (loaded.layer == layer)),
                of_layer.loaded.eq(loaded.weight),
                out.valid.eq(of_layer.change),
                out.payload.weight.eq(of_layer.weight),
                out.payload.operand.eq(of_layer.operand),
            ]
            for p, layers in enumerate(pipelines):
                here = layers[layer]
                m.d.comb += [
                    here.gradient_row.eq(of_layer.gradient_row),
                    of_layer.gradients[p].eq(here.gradients),
                ]
                m.d.comb += [here.change.eq(of_layer.change), here.operand.eq(of_layer.operand)]
                m.d.comb += [here.row.eq(of_layer.row), here.column.eq(of_layer.column)]
        m.d.comb += self.load.ready.eq(idle)
        with m.FSM():
            with m.State("idle"):
                whole = Cat(of_layer.whole for of_layer in updates).all()
                m.d.comb += [idle.eq(1), start.eq(self.samples[0].valid & ~self.load.valid & whole)]
                with m.If(start):
                    m.next = "gradients"
            with m.State("gradients"):
                with m.If(~Cat(layer.busy for layers in pipelines for layer in layers).any()):
                    m.d.comb += update.eq(1)
                    m.next = "update"
            with m.State("update"):
                with m.If(~Cat(of_layer.busy for of_layer in updates).any()):
                    m.next = "idle"
        return m

    def _pipeline(self, m: Module, p: int, share: int, start: Signal, idle: Signal) -> list[LayerStages]:
        """The layers of pipeline ``p``, with LOSS, on ``share`` samples."""
        numbers, count = self.learner.numbers, len(self.learner.masters)
        forward, backward, gradient = by_kind(list(self.units))
        layers: list[LayerStages] = []
        for layer, (k, n) in enumerate(pairwise(self.learner.layers)):
            units = (forward[layer], backward[-layer] if layer else None, gradient[count - 1 - layer])
            layers.append(LayerStages(share, k, n, numbers, units, relu=layer < count - 1))
            m.submodules[f"pipeline_{p}_layer_{layer}"] = layers[-1]
            m.d.comb += layers[-1].start.eq(start)
        for before, after in pairwise(layers):
            connect(m, before.outputs, after.inputs)
            connect(m, after.input_errors, before.output_errors)

        samples, received, accepted = self.samples[p], Signal(range(share + 1)), Signal()
        sample, inputs = samples.payload, layers[0].inputs
        m.submodules[f"labels_{p}"] = labels = Memory(shape=self.label, depth=max(2, share), init=[])
        write, read = labels.write_port(), labels.read_port()
        m.d.comb += [samples.ready.eq(~idle & (received < share)), accepted.eq(samples.valid & samples.ready)]
        with m.If(start):
            m.d.sync += received.eq(0)
        with m.If(accepted):
            m.d.sync += received.eq(received + 1)
        m.d.comb += [
            inputs.row.eq(received),
            inputs.enable.eq(accepted.replicate(self.learner.layers[0])),
            inputs.data.eq(sample.observation),
            inputs.last.eq(accepted),
            write.addr.eq(received),
            write.en.eq(accepted),
            write.data.action.eq(sample.action),
            write.data.target.eq(sample.target),
        ]

        actions, last = self.learner.layers[-1], layers[-1]
        m.submodules[f"outputs_{p}"] = outputs = RowMemory(share, actions)
        m.submodules[f"loss_{p}"] = loss = Loss(share, actions, numbers)
        connect(m, last.outputs, outputs.write)
        connect(m, loss.errors, last.output_errors)
        m.d.comb += [
            outputs.clear.eq(start),
            loss.start.eq(start),
            loss.available.eq(outputs.complete),
            outputs.reads[0].row.eq(loss.row),
            read.addr.eq(loss.row),
            loss.outputs.eq(outputs.reads[0].data),
            loss.action.eq(read.data.action),
            loss.target.eq(read.data.target),
            self.td_errors[p].valid.eq(loss.valid),
            self.td_errors[p].payload.eq(loss.td_error),
        ]
        return layers


def _results(payload: Any) -> wiring.Signature:
    """A stream that is not held back: without ``ready``."""
    return wiring.Signature({"valid": Out(1), "payload": Out(payload)})
