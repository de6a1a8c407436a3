"""What the table of mappings compares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from murmurate.bench import mapping_table
from murmurate.bench._mapping_fpga import FpgaModel
from murmurate.errors import Refusal
from murmurate.fpga.learner_model import choose
from murmurate.replay.sum_tree import sum_tree


def test_the_host_is_timed_at_the_work_that_the_model_of_the_fpga_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search for given numbers and a write of given priorities: neither weights nor powers."""
    calls: list[tuple[str, int]] = []

    class Tree:
        def __init__(self, leaves: int, **options: Any) -> None:
            self.tree = sum_tree(leaves, **options)

        @property
        def total(self) -> float:
            return self.tree.total

        def find(self, mass: Tensor) -> Tensor:
            calls.append(("find", len(mass)))
            return self.tree.find(mass)

        def set(self, index: Tensor, priority: Tensor) -> None:
            calls.append(("set", len(index)))
            self.tree.set(index, priority)

    tree: Any = Tree
    monkeypatch.setattr(mapping_table, "sum_tree", tree)
    plan = mapping_table.MappingTablePlan(leaves=4096, repetitions=2)
    seconds = mapping_table._replay_seconds(plan, (8, 32), torch.device("cpu"))
    timed = 3 + 5 * plan.repetitions
    assert calls[1:] == [(call, batch) for batch in (8, 32) for call in ("find", "set") for _ in range(timed)]
    assert min(min(found) for found in seconds.values()) > 0


FPGA = FpgaModel(65_536)
CARTPOLE, HOPPER, PONG = (mapping_table._CASES[name][:2] for name in ("CartPole", "Hopper", "Pong"))


def test_the_learner_on_the_fpga_is_two_passes_of_policy_and_critic() -> None:
    chain = choose((4, 8, 8, 5, 8, 8, 1), 32, clock_hz=91.3e6)  # of the unit that was placed
    seconds, left = FPGA.train_seconds(*CARTPOLE, 32)
    assert seconds == pytest.approx(2 * chain.gradient_step_cycles(32) / 91.3e6)
    assert 0 < left < FPGA.free_bytes == (208 - 192) * 18 * 1024 / 8


@pytest.mark.parametrize(
    ("case", "batch", "cause"),
    [
        (PONG, 32, "convolutions"),
        (CARTPOLE, 2048, "could overflow above 256 samples"),
        (HOPPER, 32, r"take 1,\d{3},\d{3} bytes, and beside the replay manager 36,864 bytes"),
    ],
)
def test_nets_that_the_fpga_cannot_train_are_refused(case: Any, batch: int, cause: str) -> None:
    with pytest.raises(Refusal, match=cause):
        FPGA.train_seconds(*case, batch)


def test_each_cell_says_what_is_measured_and_what_the_thesis_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU in place of a GPU."""
    few = {"CartPole": (*CARTPOLE, (32,))}
    monkeypatch.setattr(mapping_table, "_CASES", few)
    monkeypatch.setattr(mapping_table, "_gpu", lambda: (torch.device("cpu"), 1e9))
    monkeypatch.setattr(mapping_table, "usable_cores", lambda: 2)
    result = mapping_table.measure(mapping_table.MappingTablePlan(4096, repetitions=1), lambda line: None)
    assert set(result["replay_seconds"]["32"]) == {"cpu-1", "cpu-2", "gpu", "fpga"}
    assert set(result["train_seconds"]["CartPole"]) == {"cpu", "gpu", "fpga"}
    assert result["how"]["link to gpu"] == result["how"]["gpu"] == "measured"
    [cell] = result["cells"]
    how = {f"{cell['learner']}-{cell['replay_manager']}": cell["how"], **cell["others_how"]}
    assert set(how) == {f"{a}-{b}" for a in ("cpu", "gpu", "fpga") for b in ("cpu", "gpu", "fpga")}
    assert how["gpu-cpu"] == "measured"
    assert how["cpu-fpga"] == "learner measured; replay manager modelled; link to fpga assumed"
    assert how["fpga-cpu"].startswith("learner modelled, clock assumed; replay manager measured")
    assert cell["thesis"] == dict.fromkeys(("learner", "replay_manager", "storage"), "fpga")
    assert cell["differs_from_thesis"] == "nowhere"  # 4,096 transitions fit beside the tree


def test_pong_is_not_stored_beside_the_tree_on_the_fpga() -> None:
    assert FPGA.free_bytes < 65_536 * mapping_table._row_bytes(PONG[0])
