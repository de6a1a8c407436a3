"""Emulates the learner's pipelines: fixed point, bit by bit as ``LearnerPipeline`` (Zhang 2022, section
4.2.2.3).

Its stages: FW (forward pass), LOSS, BW (backward pass), WA (gradients of weights), and WU (weight update).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.fpga.fixed_point import (
    OPERAND_BITS,
    Lfsr,
    Saturations,
    check_sum,
    limits,
    longest_sum,
    matmul,
    narrow,
    quantise,
    value,
)

MASTER_BITS = 32
_WIDE_BITS = 56  # of the difference that is added to a master weight: it and its sum fit in int64


@dataclass(frozen=True)
class FixedPointFormats:
    """The fixed-point formats: fractional bits of activations, weights and errors (16 bits each), and of the
    master weights that the weight update keeps (32 bits); all bits of an accumulator.

    Raises Refusal for formats between which the hardware cannot shift, or that an error of 1 does not fit,
    and for an accumulator of too few or too many bits.
    """

    activation: int = 11
    weight: int = 12
    error: int = 14
    master: int = 28
    accumulator_bits: int = 40

    def __post_init__(self) -> None:
        if not 0 <= self.activation <= self.error <= OPERAND_BITS - 2:
            raise Refusal(
                f"activations have {self.activation} fractional bits and errors {self.error}. Use 0 to "
                f"{OPERAND_BITS - 2}, and as many for errors as for activations at least."
            )
        if not 0 <= self.weight < self.master < MASTER_BITS:
            raise Refusal(
                f"weights have {self.weight} fractional bits and master weights {self.master}. Use 0 to "
                f"{MASTER_BITS - 1}, and more for master weights."
            )
        if not MASTER_BITS <= self.accumulator_bits <= _WIDE_BITS:
            raise Refusal(
                f"an accumulator has {self.accumulator_bits} bits; use {MASTER_BITS} to {_WIDE_BITS}."
            )

    @property
    def largest_batch(self) -> int:
        """The greatest power of two of samples whose gradients cannot overflow an accumulator."""
        return 1 << (longest_sum(self.accumulator_bits).bit_length() - 1)


class GradientStep(NamedTuple):
    """td_error: [B] float32, target - Q. gradients: gradient of each layer [K + 1, N], summed over the batch,
    with ``activation + error`` fractional bits. outputs: outputs of the last layer, [B, A] int64."""

    td_error: Tensor
    gradients: list[Tensor]
    outputs: Tensor


class EmulatedLearner:
    """An MLP with ReLU that learns action values by SGD, in the arithmetic of the pipeline.

    The last row of a weight matrix is its bias: the activations of a layer end with a constant 1. The weight
    update is w <- w - 2^-rate_shift * (mean gradient), which needs a shift and no multiplier.

    Args:
        layers: widths of all layers, from the observation to the actions.
        rate_shift: -log2 of the learning rate, 0 to 31.
        generator: generator of the initial weights, uniform within 1 / sqrt(K).
        pipelines: DP, their number, a power of two; the batch is split among them and their gradients are
            added.
        stochastic: round the updates of weights stochastically, by an ``Lfsr`` for each layer, instead of to
            the nearest.

    ``saturations`` counts, in ``step`` only, by stage: observations and targets (``inputs``), activations and
    outputs (``forward``), errors (``backward``), and master weights (``weights``).

    Raises Refusal for fewer than two layers, and for a ``rate_shift`` or ``pipelines`` out of range.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        rate_shift: int,
        generator: torch.Generator,
        numbers: FixedPointFormats = FixedPointFormats(),
        pipelines: int = 1,
        stochastic: bool = False,
    ) -> None:
        if len(layers) < 2 or min(layers) < 1:
            raise Refusal(
                f"layers is {tuple(layers)}; give the widths of at least two, such as (4, 8, 8, 2)."
            )
        if not 0 <= rate_shift < MASTER_BITS:
            raise Refusal(f"rate_shift is {rate_shift}; use 0 to {MASTER_BITS - 1}.")
        if not _is_power_of_two(pipelines) or pipelines > numbers.largest_batch:
            raise Refusal(
                f"{pipelines} pipelines cannot share a batch equally, or cannot sum its gradients in "
                f"{numbers.accumulator_bits} bits. Use a power of two up to {numbers.largest_batch}."
            )
        self.layers, self.numbers, self.rate_shift = tuple(layers), numbers, rate_shift
        self.pipelines = pipelines
        self.noises = [Lfsr() if stochastic else None for _ in layers[1:]]
        self.saturations = {s: Saturations() for s in ("inputs", "forward", "backward", "weights")}
        self.masters = []
        for inputs, outputs in pairwise(layers):
            drawn = torch.rand(inputs + 1, outputs, generator=generator) * 2 - 1
            self.masters.append(quantise(drawn / inputs**0.5, numbers.master, MASTER_BITS))

    @property
    def weights(self) -> list[Tensor]:
        """The weights as the tensor units hold them: [K + 1, N] of each layer, 16 bits."""
        return [narrow(m, self.numbers.master - self.numbers.weight) for m in self.masters]

    def forward(
        self, inputs: Tensor, weights: list[Tensor] | None = None, count: Saturations | None = None
    ) -> list[Tensor]:
        """FW: the activations of each layer with their constant 1, [B, K + 1], and the outputs [B, A].

        inputs: [B, S] operands.
        """
        n = self.numbers
        activations, x = [], inputs
        weights = self.weights if weights is None else weights
        one = torch.full((len(inputs), 1), 1 << n.activation)
        for layer, weight in enumerate(weights):
            x = torch.cat((x, one), 1)
            activations.append(x)
            x = narrow(matmul(x, weight, n.accumulator_bits), n.weight, count=count)
            if layer < len(weights) - 1:
                x = x.clamp(min=0)
        return [*activations, x]

    def values(self, observation: Tensor, weights: list[Tensor] | None = None) -> Tensor:
        """[B, A] float32, the outputs for ``observation`` [B, S]."""
        activation = self.numbers.activation
        return value(self.forward(quantise(observation, activation), weights)[-1], activation)

    def errors(self, outputs: Tensor, action: Tensor, target: Tensor) -> Tensor:
        """LOSS: the gradient of Huber's loss, [B, A]: output - target, clamped to [-1, 1], at the action,
        else 0.

        target: [B] operands.
        """
        n = self.numbers
        one = 1 << n.activation
        taken = action[:, None]
        slope = (outputs.gather(1, taken) - target[:, None]).clamp(-one, one) << (n.error - n.activation)
        return torch.zeros_like(outputs).scatter_(1, taken, slope)

    def gradients(self, activations: list[Tensor], errors: Tensor) -> list[Tensor]:
        """BW and WA of one pipeline: the gradient of each layer, [K + 1, N], summed over the pipeline's
        samples."""
        n, weights = self.numbers, self.weights
        gradients = []
        for layer in reversed(range(len(weights))):
            gradients.append(matmul(activations[layer].T, errors, n.accumulator_bits))
            if layer:
                wide = matmul(errors, weights[layer][:-1].T, n.accumulator_bits)
                errors = narrow(wide, n.weight, count=self.saturations["backward"])
                errors = errors * (activations[layer][:, :-1] > 0)
        return gradients[::-1]

    def step(self, observation: Tensor, action: Tensor, target: Tensor) -> GradientStep:
        """One gradient step on B transitions: ``observation`` [B, S], ``action`` [B], ``target`` [B] float.

        Raises Refusal for values that are not finite, and if B is no power of two, less than the number of
        pipelines, too large for an accumulator, or such that gradients would be shifted too far.
        """
        n, size, count = self.numbers, len(observation), self.saturations["inputs"]
        self.checked_shift(size)
        inputs = quantise(observation, n.activation, count=count)
        targets = quantise(target, n.activation, count=count)
        share = size // self.pipelines
        sums, outputs = [torch.zeros_like(m) for m in self.masters], []
        for start in range(0, size, share):
            rows = slice(start, start + share)
            *activations, output = self.forward(inputs[rows], count=self.saturations["forward"])
            outputs.append(output)
            errors = self.errors(output, action[rows], targets[rows])
            gradients = self.gradients(activations, errors)
            sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        self.update(sums, size)
        output = torch.cat(outputs)
        error = targets - output.gather(1, action[:, None])[:, 0]
        return GradientStep(value(error, n.activation), sums, output)

    def update_shift(self, batch: int) -> int:
        """By how many bits a sum of gradients is shifted right before it is subtracted from a master
        weight."""
        n = self.numbers
        return self.rate_shift + batch.bit_length() - 1 - (n.master - n.activation - n.error)

    def checked_shift(self, batch: int) -> int:
        """``update_shift`` for a batch of that size. Raises Refusal if hardware cannot learn from it: see
        ``step``; and for layers so wide that sums could overflow."""
        n, shift = self.numbers, self.update_shift(batch)
        if not _is_power_of_two(batch) or not self.pipelines <= batch <= n.largest_batch:
            raise Refusal(
                f"a batch of {batch} on {self.pipelines} pipelines: hardware divides by shifting, and its "
                f"sums have {n.accumulator_bits} bits. Use a power of two from {self.pipelines} to "
                f"{n.largest_batch}."
            )
        if not 1 <= shift <= n.accumulator_bits:
            nearest = min(max(shift, 1), n.accumulator_bits)
            raise Refusal(
                f"rate_shift {self.rate_shift} and a batch of {batch} shift gradients right by {shift} bits, "
                f"and hardware by 1 to {n.accumulator_bits}. Use a rate_shift of "
                f"{self.rate_shift + nearest - shift}, or a {'larger' if shift < 1 else 'smaller'} batch."
            )
        check_sum(max(*self.layers[2:], *(k + 1 for k in self.layers[:-1]), 0), n.accumulator_bits)
        return shift

    def update(self, gradients: list[Tensor], batch: int) -> None:
        """WU: updates the weights of each layer one after another, in the order of rows."""
        low, high = limits(MASTER_BITS)
        shift, count = self.update_shift(batch), self.saturations["weights"]
        for master, gradient, lfsr in zip(self.masters, gradients, self.noises, strict=True):
            noise = None if lfsr is None else lfsr.draw(gradient.numel()).view_as(gradient)
            wide = master - narrow(gradient, shift, _WIDE_BITS, noise=noise)  # too wide to saturate
            master.copy_(wide.clamp(low, high))
            count.numbers += wide.numel()
            count.saturated += int((wide != master).sum())


def _is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)
