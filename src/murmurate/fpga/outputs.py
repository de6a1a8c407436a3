"""Moves flip-flops behind an ECP5's block RAMs into the block RAMs' own output registers.

A block RAM's data arrive 5.8 ns after the clock edge without its output register, and about 2 ns with it.
Yosys does not use that register (YosysHQ/yosys#5814), so this module replaces the flip-flops in Yosys'
netlist.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_BITS = 18  # data outputs of a port


def use_output_registers(netlist: dict[str, Any]) -> int:
    """Change ``netlist`` (Yosys JSON, after synth_ecp5); returns how many ports of block RAMs were changed.

    A port is changed if each of its used data outputs is connected to the DI input of one flip-flop and to
    nothing else, and all these flip-flops have the port's clock and neither clock enable nor reset.
    """
    changed = 0
    for module in netlist["modules"].values():
        cells = module["cells"]
        readers: Counter[int] = Counter()
        for cell in cells.values():
            for port, bits in cell["connections"].items():
                if cell["port_directions"][port] != "output":
                    readers.update(bit for bit in bits if isinstance(bit, int))
        for port in module["ports"].values():
            readers.update(bit for bit in port["bits"] if isinstance(bit, int))
        registers = {
            cell["connections"]["DI"][0]: name
            for name, cell in cells.items()
            if cell["type"] == "TRELLIS_FF" and _is_plain(cell)
        }
        for cell in [c for c in cells.values() if c["type"] == "DP16KD"]:
            changed += sum(_change_port(cells, cell, letter, registers, readers) for letter in "AB")
    return changed


def _is_plain(cell: dict[str, Any]) -> bool:
    """Whether the flip-flop ``cell`` loads its input at every rising edge."""
    parameters, connections = cell["parameters"], cell["connections"]
    return (
        (parameters.get("CEMUX", "1").strip() == "1" or connections.get("CE", ["1"]) == ["1"])
        and connections.get("LSR", ["0"]) in (["0"], ["x"], [])
        and parameters.get("CLKMUX", "CLK") == "CLK"
    )


def _change_port(
    cells: dict[str, Any],
    memory: dict[str, Any],
    letter: str,
    registers: dict[int, str],
    readers: Counter[int],
) -> bool:
    """Change port ``letter`` of ``memory`` if possible; returns whether it was changed.

    registers: names of the flip-flops, by the bit at their input. readers: how many inputs read each bit.
    """
    connections = memory["connections"]
    ports = [f"DO{letter}{i}" for i in range(_BITS)]
    used = {
        port: connections[port][0]
        for port in ports
        if connections.get(port) and isinstance(connections[port][0], int) and readers[connections[port][0]]
    }
    clock = connections.get(f"CLK{letter}")
    if not used or any(
        readers[bit] != 1 or bit not in registers or cells[registers[bit]]["connections"]["CLK"] != clock
        for bit in used.values()
    ):
        return False
    for port, bit in used.items():
        connections[port] = cells.pop(registers.pop(bit))["connections"]["Q"]
    memory["parameters"][f"REGMODE_{letter}"] = "OUTREG"
    connections[f"OCE{letter}"] = ["1"]
    memory["port_directions"][f"OCE{letter}"] = "input"
    return True
