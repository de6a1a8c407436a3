"""``murmurate fpga``: a prioritized replay's manager, and the learner, as hardware."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from murmurate.cli.options import number_argument, option
from murmurate.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Seed

_COLUMNS = {
    "leaves": "leaves",
    "fan_out": "K",
    "width": "W",
    "row_bits": "row bits",
    "lut": "LUT",
    "ff": "FF",
    "bram": "block RAM",
    "dsp": "DSP",
    "sample_cycles": "sample",
    "update_cycles": "update",
    "mhz": "MHz",
}


def add_verbs(verbs: Any) -> None:
    count, non_negative = number_argument(PositiveInt), number_argument(NonNegativeInt)

    def verb(name: str, help: str, act: Any, tree: bool = True) -> Any:
        parser = verbs.add_parser(name, help=help)
        if tree:
            option(parser, "--leaves", count, 4096, "transitions; a power of two")
            option(parser, "--fan-out", count, 4, "children of a node, K; a power of two")
            option(parser, "--width", count, 16, "bits of a priority")
        parser.add_argument("--json", action="store_true")
        parser.set_defaults(act=act)
        return parser

    generate = verb("generate", "write the replay manager as Verilog", _generate)
    row_bits = ("--row-bits", non_negative, 0, "bits of each transition's row; 0: no rows")
    option(generate, *row_bits)
    option(generate, "--out", Path, Path("replay_manager.v"), "the file")
    simulate = verb("simulate", "compare the simulated hardware with prefix sums", _simulate)
    option(simulate, "--operations", count, 20_000, "number of updates, and of samples")
    option(simulate, "--seed", number_argument(Seed), 0, "of what is drawn")
    pnr = verb("pnr", "place and route: area and clock (minutes)", _pnr)
    option(pnr, *row_bits)
    option(pnr, "--device", str, "lfe5u-85f", "a Lattice ECP5")
    option(pnr, "--seed", count, 1, "seed of the placement")
    option(pnr, "--target-mhz", number_argument(PositiveFloat), 150.0, "clock that is aimed at")
    verb("report", "the committed results of place and route", _report, tree=False)
    learner = verb("learner", "write the learner's pipelines as Verilog", _learner, tree=False)
    option(learner, "--out", Path, Path("learner.v"), "the file")
    learner_pnr = verb("learner-pnr", "place and route the learner: area and clock", _learner_pnr, tree=False)
    for parser in (learner, learner_pnr):
        option(parser, "--layers", _layers, "4,8,8,2", "widths of all layers of neurons, inputs to actions")
        option(parser, "--batch", count, 64, "samples of a gradient step; a power of two")
        option(parser, "--rate-shift", non_negative, 2, "-log2 of the learning rate")
        option(parser, "--multipliers", count, 156, "the most that may be used; an LFE5U-85F has 156")


def _layers(word: str) -> tuple[int, ...]:
    return tuple(map(number_argument(PositiveInt), word.split(",")))


def _shape(options: argparse.Namespace) -> Any:
    from murmurate.fpga.shape import TreeShape

    return TreeShape(options.leaves, options.fan_out, options.width)


def _generate(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.fpga.verilog import rtlil, verilog

    shape = _shape(options)
    text = verilog(rtlil(shape, options.row_bits))  # refuses what is not installed

    from murmurate.fpga.manager import ReplayManager

    manager = ReplayManager(shape, options.row_bits)
    options.out.write_text(text)
    facts = {
        "out": str(options.out),
        "lines": text.count("\n"),
        "sample_cycles": manager.sample_latency,
        "update_cycles": shape.update_latency,
        "memory_bits": manager.memory_bits,
    }
    if options.json:
        print(json.dumps(facts))
    else:
        print(
            f"{options.out}: {facts['lines']:,} lines; {manager.memory_bits:,} bits of memory; in every "
            f"cycle a sample and an update begin ({manager.sample_latency} and {shape.update_latency} cycles)"
        )
    return 0


def _simulate(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.fpga.verify import verify

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = verify(_shape(options), options.operations, options.seed, say)
    if options.json:
        print(json.dumps(dataclasses.asdict(result)))
    else:
        print(
            f"{result.updates:,} updates and {result.samples:,} samples, {result.together:,} of each in the "
            f"same cycles: {result.mismatches} mismatches; "
            f"{result.cycles:,} cycles, {result.cycles_over_model:.4f} of the model, in "
            f"{result.wall_seconds:.0f} s"
        )
    return 1 if result.mismatches else 0


def _pnr(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.fpga.place_and_route import place_and_route

    row = place_and_route(
        _shape(options),
        options.row_bits,
        device=options.device,
        seed=options.seed,
        target_mhz=options.target_mhz,
    )
    if options.json:
        print(json.dumps(row))
    else:
        _show([row])
    return 0


def _report(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.fpga.model import table

    if options.json:
        print(json.dumps(table()))
    else:
        _show(list(table()))
    return 0


def _chosen_learner(options: argparse.Namespace) -> tuple[Any, Any]:
    """The fastest design with at most ``--multipliers``, and its emulation."""
    import torch

    from murmurate.fpga.learner import EmulatedLearner
    from murmurate.fpga.learner_model import choose

    def learner(pipelines: int) -> EmulatedLearner:
        return EmulatedLearner(
            options.layers,
            rate_shift=options.rate_shift,
            generator=torch.Generator(),
            pipelines=pipelines,
            stochastic=True,
        )

    learner(1).checked_shift(options.batch)  # a refusal that speaks of no pipelines, as none are chosen
    model = choose(options.layers, options.batch, clock_hz=1.0, dsps=options.multipliers)
    return model, learner(model.dp)


def _learner(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.fpga.verilog import learner_rtlil, verilog

    model, learner = _chosen_learner(options)
    text = verilog(learner_rtlil(learner, model.units, options.batch))
    options.out.write_text(text)
    facts = {
        "out": str(options.out),
        "lines": text.count("\n"),
        "pipelines": model.dp,
        "units": [[unit.rows, unit.columns] for unit in model.units],
        "multipliers": model.dsps,
        "cycles": model.gradient_step_cycles(options.batch),
    }
    if options.json:
        print(json.dumps(facts))
    else:
        print(
            f"{options.out}: {facts['lines']:,} lines; pipelines: {model.dp}, multipliers: {model.dsps}; a "
            f"gradient step on {options.batch} samples takes {facts['cycles']:,} cycles"
        )
    return 0


def _learner_pnr(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.fpga.learner_area import place_and_route_learner

    model, learner = _chosen_learner(options)
    row = place_and_route_learner(learner, model.units, options.batch)
    cycles = model.gradient_step_cycles(options.batch)
    row |= {"multipliers": model.dsps, "cycles": cycles, "microseconds": cycles / row["mhz"]}
    if options.json:
        print(json.dumps(row))
    else:
        print(
            f"{row['lut']:,} LUT, {row['ff']:,} FF, {row['bram']} block RAM, {row['dsp']} DSP, "
            f"{row['mhz']:g} MHz (static timing, no board): {cycles:,} cycles, {row['microseconds']:.2f} us "
            "a gradient step"
        )
    return 0


def _show(rows: list[dict[str, Any]]) -> None:
    """Print a table in which nothing is cut, however narrow the terminal."""
    lines = [list(_COLUMNS.values())]
    lines += [[f"{row[name]:,}" for name in _COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print("place and route (static timing, no board); sample, update: latencies in cycles")
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
