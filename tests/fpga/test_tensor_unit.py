"""Simulated tensor units give the emulation's numbers, whoever waits for whom, in the model's cycles."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

pytest.importorskip("amaranth", reason="needs murmurate[fpga]")

from amaranth.sim import Simulator

from murmurate.errors import Refusal
from murmurate.fpga.fixed_point import Lfsr, limits, matmul, narrow
from murmurate.fpga.learner import MASTER_BITS
from murmurate.fpga.learner_model import Unit, outer_cycles, product_cycles
from murmurate.fpga.tensor_unit import OuterUnit, TensorUnit, WeightUpdate

SHAPES = [(1, 1), (3, 5), (8, 2), (4, 4)]


def operands(*size: int, seed: int = 0, bits: int = 16) -> torch.Tensor:
    """Random numbers, with both limits among them."""
    low, high = limits(bits)
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(low, high + 1, size, generator=generator)
    extreme = torch.rand(size, generator=generator)
    return found.where(extreme > 0.1, low).where(extreme < 0.9, high)


def simulate(
    dut: Any,
    feeds: list[tuple[Any, list[Any]]],
    output: Any,
    expected: int,
    stalls: float = 0.0,
    seed: int = 0,
) -> tuple[list[Any], int]:
    """Feed streams, one after the other, and take ``expected`` outputs; returns them and the cycles from the
    first cycle in which an element of the last feed was offered. stalls: chance that a side pauses."""
    chance, taken, cycles = random.Random(0), [], [0]

    async def bench(context: Any) -> None:
        for port, elements in feeds:
            left = list(elements)
            cycles[0] = 0
            final = port is feeds[-1][0]
            offered = False
            while left or (final and len(taken) < expected):
                offered = bool(left) and (offered or chance.random() >= stalls)  # valid stays until accepted
                context.set(port.valid, offered)
                if offered:
                    context.set(port.payload, left[0])
                context.set(output.ready, chance.random() >= stalls)
                accepted = offered and context.get(port.ready)
                if context.get(output.valid) and context.get(output.ready):
                    taken.append(context.get(output.payload))
                await context.tick()
                cycles[0] += 1
                if accepted:
                    left.pop(0)
                    offered = False
                assert cycles[0] < 20_000
            context.set(port.valid, 0)

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return taken, cycles[0]


@pytest.mark.parametrize("stalls", [0.0, 0.4])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_with_stationary_weights(rows: int, columns: int, stalls: float) -> None:
    x, w, partial = (
        operands(20, rows),
        operands(rows, columns, seed=1),
        operands(20, columns, seed=2, bits=32),
    )
    dut = TensorUnit(rows, columns)
    inputs = [{"x": a, "partial": p} for a, p in zip(x.tolist(), partial.tolist(), strict=True)]
    feeds = [(dut.weights, w.flip(0).tolist()), (dut.inputs, inputs)]
    sums, cycles = simulate(dut, feeds, dut.sums, 20, stalls)
    assert [list(row) for row in sums] == (partial + matmul(x, w)).tolist()
    if not stalls:
        # the weights were loaded before
        assert cycles + rows == product_cycles(Unit(rows, columns), 20, rows, columns)


@pytest.mark.parametrize("stalls", [0.0, 0.4])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sums_of_outer_products(rows: int, columns: int, stalls: float) -> None:
    a, d = operands(24, rows), operands(24, columns, seed=1)
    dut = OuterUnit(rows, columns)
    pairs = [{"a": a[i].tolist(), "d": d[i].tolist(), "last": i in (7, 23)} for i in range(24)]
    sums, cycles = simulate(dut, [(dut.inputs, pairs)], dut.sums, 2 * rows, stalls)
    expected = torch.cat((matmul(a[:8].T, d[:8]), matmul(a[8:].T, d[8:])))
    assert [list(row) for row in sums] == expected.tolist()
    if not stalls:
        unit = Unit(rows, columns)
        assert cycles == sum(outer_cycles(unit, pairs, rows, columns) for pairs in (8, 16))


@pytest.mark.parametrize("stalls", [0.0, 0.4])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("shift", [1, 7, 18])
def test_weight_updates(shift: int, stochastic: bool, stalls: float) -> None:
    weight, gradient = operands(60, bits=32), operands(60, seed=1, bits=40) >> 6
    dut = WeightUpdate(shift, 16, stochastic=stochastic)
    inputs = [{"weight": w, "gradient": g} for w, g in zip(weight.tolist(), gradient.tolist(), strict=True)]
    found, _ = simulate(dut, [(dut.inputs, inputs)], dut.outputs, 60, stalls)
    noise = Lfsr().draw(60) if stochastic else None
    new = (weight - narrow(gradient, shift, 56, noise=noise)).clamp(*limits(MASTER_BITS))
    assert [f.weight for f in found] == new.tolist()
    assert [f.operand for f in found] == narrow(new, 16).tolist()


def test_shifts_that_hardware_has_not_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightUpdate, "_MustUse__silence", True)  # no warning that these were not elaborated
    for shift, operand_shift in ((0, 16), (4, 0)):
        with pytest.raises(Refusal, match="at least 1"):
            WeightUpdate(shift, operand_shift)
    gc.collect()
