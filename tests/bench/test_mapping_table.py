"""What the table of mappings compares."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from murmurate.bench import mapping_table
from murmurate.replay.sum_tree import sum_tree


def test_the_host_is_timed_at_the_work_that_the_model_of_the_fpga_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search for given numbers and a write of given priorities: neither weights nor powers."""
    calls: list[tuple[str, int]] = []

    class Tree:
        def __init__(self, leaves: int, seed: int) -> None:
            self.tree = sum_tree(leaves, seed=seed)

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
    draws, updates = mapping_table._host_replay(plan, (8, 32))
    timed = 3 + 5 * plan.repetitions
    assert calls[1:] == [(call, batch) for batch in (8, 32) for call in ("find", "set") for _ in range(timed)]
    assert min(draws.seconds(8), updates.seconds(8)) > 0
