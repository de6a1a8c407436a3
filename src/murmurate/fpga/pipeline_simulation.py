"""The learner's pipelines in Amaranth's cycle-accurate simulator, driven from Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.fpga.fixed_point import quantise, value
from murmurate.fpga.learner import EmulatedLearner
from murmurate.fpga.learner_model import Unit
from murmurate.fpga.simulation import PERIOD_SECONDS


class SimulatedStep(NamedTuple):
    """td_error: [B] float32, target - Q. cycles: from the first offer of a sample to the last new weight."""

    td_error: Tensor
    cycles: int


class SimulatedPipeline:
    """A ``LearnerPipeline`` with a simulated clock, whose first weights are those of ``learner``, which
    has made no step if it rounds stochastically: hardware begins with the first random number.

    masters, operands: the weights of each layer [K + 1, N] int64, as they leave the pipeline. cycles: how
    many were simulated so far.

    Raises Refusal as ``LearnerPipeline`` does, and if Amaranth is not installed.
    """

    def __init__(self, learner: EmulatedLearner, units: Sequence[Unit], batch: int) -> None:
        try:
            from amaranth.sim import Simulator

            from murmurate.fpga.pipeline import LearnerPipeline
        except ImportError as error:
            raise Refusal(
                "simulating an FPGA needs Amaranth. Install murmurate[fpga]: pip install 'murmurate[fpga]'."
            ) from error
        self.numbers, self.pipelines, self.batch = learner.numbers, learner.pipelines, batch
        self.masters = [torch.zeros_like(master) for master in learner.masters]
        self.operands = [torch.zeros_like(master) for master in learner.masters]
        self.dut = LearnerPipeline(learner, units, batch)
        self.cycles, self._last_change = 0, 0
        self._loads: deque[dict[str, int]] = deque()
        self._samples: list[deque[dict[str, Any]]] = [deque() for _ in range(self.pipelines)]
        self._td_errors: list[list[int]] = [[] for _ in range(self.pipelines)]
        self._updated: list[list[tuple[int, int]]] = [[] for _ in self.masters]
        self._simulator = Simulator(self.dut)
        self._simulator.add_clock(PERIOD_SECONDS)
        self._simulator.add_testbench(self._drive, background=True)
        self.load(learner.masters)

    def load(self, masters: Sequence[Tensor]) -> None:
        """Set the weights of each layer, [K + 1, N] int64 of 32 bits."""
        self._queue_weights(masters)
        self._run_to_the_last_weight()

    def _queue_weights(self, masters: Sequence[Tensor]) -> None:
        for layer, master in enumerate(masters):
            self._loads.extend({"layer": layer, "weight": weight} for weight in master.flatten().tolist())

    def _offers(self) -> bool:
        """Whether a next element is offered to a port in this cycle."""
        return True

    async def _drive(self, context: Any) -> None:
        feeds = [(self.dut.load, self._loads), *zip(self.dut.samples, self._samples, strict=True)]
        offered = [False] * len(feeds)  # an offer stands until it is accepted
        while True:
            for i, (port, elements) in enumerate(feeds):
                offered[i] = bool(elements) and (offered[i] or self._offers())
                context.set(port.valid, offered[i])
                if offered[i]:
                    context.set(port.payload, elements[0])
            for i, (port, elements) in enumerate(feeds):
                if offered[i] and context.get(port.ready):
                    elements.popleft()
                    offered[i] = False
            for port, errors in zip(self.dut.td_errors, self._td_errors, strict=True):
                if context.get(port.valid):
                    errors.append(context.get(port.payload))
            for port, weights in zip(self.dut.updated, self._updated, strict=True):
                if context.get(port.valid):
                    new = context.get(port.payload)
                    weights.append((new.weight, new.operand))
                    self._last_change = self.cycles
            await context.tick()
            self.cycles += 1

    def _run(self, cycles: int) -> None:
        self._simulator.run_until((self.cycles + cycles) * PERIOD_SECONDS)

    def _run_to_the_last_weight(self) -> None:
        """Run until each weight has been given once, and let the pipeline become idle."""
        sizes = [master.numel() for master in self.masters]
        while [len(weights) for weights in self._updated] != sizes:
            self._run(1)
        self._run(2)
        for layer, weights in enumerate(self._updated):
            shape = self.masters[layer].shape
            masters, operands = zip(*weights, strict=True)
            self.masters[layer] = torch.tensor(masters).view(shape)
            self.operands[layer] = torch.tensor(operands).view(shape)
            weights.clear()

    def step(self, observation: Tensor, action: Tensor, target: Tensor) -> SimulatedStep:
        """The gradient step of ``EmulatedLearner.step`` on as many transitions as the pipeline is made for.

        Raises ValueError for another number of them, and for an action without an output.
        """
        self._queue_samples(observation, action, target)
        began = self.cycles
        self._run_to_the_last_weight()
        errors = torch.tensor([error for errors in self._td_errors for error in errors])
        for collected in self._td_errors:
            collected.clear()
        return SimulatedStep(value(errors, self.numbers.activation), self._last_change - began + 1)

    def _queue_samples(self, observation: Tensor, action: Tensor, target: Tensor) -> None:
        if {len(observation), len(action), len(target)} != {self.batch}:
            raise ValueError(
                f"{len(observation)} transitions, and the pipeline is for batches of {self.batch}"
            )
        outputs = self.masters[-1].shape[1]
        if not 0 <= int(action.min()) <= int(action.max()) < outputs:
            raise ValueError(f"an action is not among the {outputs} outputs")
        activation, share = self.numbers.activation, self.batch // self.pipelines
        inputs, targets = quantise(observation, activation).tolist(), quantise(target, activation).tolist()
        for i, (x, taken, wanted) in enumerate(zip(inputs, action.tolist(), targets, strict=True)):
            sample = {"observation": x, "action": taken, "target": wanted}
            self._samples[i // share].append(sample)
