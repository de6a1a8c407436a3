"""Which flip-flops behind a block RAM become its output register, in netlists written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from murmurate.fpga.outputs import use_output_registers

CLOCK, OTHER = 1, 2


def netlist(**changes: Any) -> dict[str, Any]:
    """A block RAM with two data outputs of port A (bits 10 and 11), each behind a flip-flop.

    changes: connections of the second flip-flop that differ, and its CEMUX.
    """

    def flip_flop(data: int, out: int, **changed: Any) -> dict[str, Any]:
        parameters = {"CEMUX": changed.pop("CEMUX", "1 "), "CLKMUX": "CLK", "LSRMUX": "LSR"}
        connections = {"CLK": [CLOCK], "LSR": ["0"], "DI": [data], "Q": [out], **changed}
        directions = {name: "output" if name == "Q" else "input" for name in connections}
        return {
            "type": "TRELLIS_FF",
            "parameters": parameters,
            "connections": connections,
            "port_directions": directions,
        }

    memory = {
        "type": "DP16KD",
        "parameters": {"REGMODE_A": "NOREG"},
        "connections": {"CLKA": [CLOCK], "DOA0": [10], "DOA1": [11], "DOA2": [12]},  # nothing reads DOA2
        "port_directions": {"CLKA": "input", "DOA0": "output", "DOA1": "output", "DOA2": "output"},
    }
    cells = {"memory": memory, "one": flip_flop(10, 20), "other": flip_flop(11, 21, **changes)}
    return {"modules": {"top": {"ports": {"out": {"bits": [20, 21]}}, "cells": cells}}}


def test_flip_flops_behind_all_outputs_become_the_output_register() -> None:
    found = netlist()

    assert use_output_registers(found) == 1
    (memory,) = found["modules"]["top"]["cells"].values()
    assert memory["parameters"]["REGMODE_A"] == "OUTREG"
    assert [memory["connections"][name] for name in ("DOA0", "DOA1", "OCEA")] == [[20], [21], ["1"]]


@pytest.mark.parametrize(
    "changes",
    [{"CEMUX": "CE", "CE": [3]}, {"LSR": [4]}, {"CLK": [OTHER]}, {"M": [11]}],
    ids=["enable", "reset", "other clock", "read twice"],
)
def test_a_port_stays_as_it_is_where_one_flip_flop_does_more(changes: dict[str, Any]) -> None:
    found = netlist(**changes)

    assert use_output_registers(found) == 0
    assert len(found["modules"]["top"]["cells"]) == 3
