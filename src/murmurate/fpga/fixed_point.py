"""Fixed-point arithmetic as hardware does it, bit by bit, on int64 tensors. Nothing here needs Amaranth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from murmurate.errors import Refusal

OPERAND_BITS = 16
LFSR_BITS = 16
LFSR_TAPS = (15, 14, 12, 3)  # x^16 + x^15 + x^13 + x^4 + 1: period 65,535


def quantise(
    values: Tensor, fraction: int, bits: int = OPERAND_BITS, *, count: Saturations | None = None
) -> Tensor:
    """``values`` as the nearest fixed-point numbers of ``bits`` bits, ``fraction`` of them fractional, in
    int64. count: counts saturations. Raises Refusal for values that are not finite."""
    if not bool(values.isfinite().all()):
        raise Refusal("a value is not finite, and fixed point has no such number. Give finite values only.")
    return _saturate(torch.round(values.double() * 2.0**fraction), bits, count).long()


def value(numbers: Tensor, fraction: int) -> Tensor:
    """The values of fixed-point ``numbers``, in float32."""
    return (numbers.double() * 2.0**-fraction).float()


def limits(bits: int) -> tuple[int, int]:
    """The least and the greatest number of ``bits`` bits in two's complement."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


@dataclass
class Saturations:
    """How many numbers were quantised or narrowed, and how many of them lay outside the new range."""

    numbers: int = 0
    saturated: int = 0


def narrow(
    wide: Tensor, shift: int, bits: int = OPERAND_BITS, *, noise: Tensor | None = None,
    count: Saturations | None = None,
) -> Tensor:  # fmt: skip
    """``wide`` without its last ``shift`` bits (a negative shift appends zeros), saturated to ``bits`` bits.

    Rounds to the nearest number, halves upwards: half of the last remaining place is added before the bits
    are cut off. noise: random numbers of ``LFSR_BITS`` bits in the shape of ``wide``, whose upper bits are
    added instead of the half (stochastic rounding: the expected result is the exact number). count: counts
    saturations.
    """
    if shift > 0:
        if noise is None:
            wide = wide + (1 << (shift - 1))
        else:
            unused_bits = LFSR_BITS - shift
            wide = wide + (noise >> unused_bits if unused_bits >= 0 else noise << -unused_bits)
        wide = wide >> shift
    else:
        wide = wide << -shift
    return _saturate(wide, bits, count)


def _saturate(wide: Tensor, bits: int, count: Saturations | None) -> Tensor:
    clamped = wide.clamp(*limits(bits))
    if count is not None:
        count.numbers += wide.numel()
        count.saturated += int((clamped != wide).sum())
    return clamped


def longest_sum(accumulator_bits: int) -> int:
    """How many products of two operands an accumulator can sum without overflow, whatever their values."""
    return (1 << (accumulator_bits - 1 - 2 * (OPERAND_BITS - 1))) - 1


def matmul(a: Tensor, b: Tensor, accumulator_bits: int = 40) -> Tensor:
    """The exact product [M, K] @ [K, N] of operands, in int64. Raises Refusal if a sum of K products may
    overflow an accumulator of that many bits."""
    check_sum(a.shape[1], accumulator_bits)
    return a @ b


def check_sum(products: int, accumulator_bits: int) -> None:
    """Raises Refusal if a sum of so many products may overflow an accumulator."""
    if products > longest_sum(accumulator_bits):
        raise Refusal(
            f"a sum of {products} products may overflow an accumulator of {accumulator_bits} bits, which "
            f"holds {longest_sum(accumulator_bits)}. Use narrower layers, smaller batches, or more bits."
        )


@cache
def _lfsr_states() -> Tensor:
    """All states in their order, from 1: [65535]."""
    states, state = [], 1
    for _ in range((1 << LFSR_BITS) - 1):
        states.append(state)
        bit = 0
        for tap in LFSR_TAPS:
            bit ^= state >> tap & 1
        state = (state << 1 | bit) & ((1 << LFSR_BITS) - 1)
    return torch.tensor(states)


class Lfsr:
    """A linear feedback shift register whose states are the random numbers."""

    def __init__(self) -> None:
        self._position = 0

    def draw(self, count: int) -> Tensor:
        """The current state and the ``count`` - 1 states after it: [count]."""
        states = _lfsr_states()
        drawn = states[(torch.arange(count) + self._position) % len(states)]
        self._position = (self._position + count) % len(states)
        return drawn
