"""A replay on the simulated hardware draws what one on the host would, and an agent learns from it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("amaranth", reason="needs murmurate[fpga]")

from murmurate.cli.main import main
from murmurate.replay._fpga_tree import FpgaTree
from murmurate.replay.sum_tree import sum_tree
from murmurate.replay.tree import Draw


def test_it_draws_what_the_tree_on_the_host_draws() -> None:
    generator = torch.Generator().manual_seed(2)
    hardware, host = FpgaTree(50, seed=3), sum_tree(50, seed=3, backend="torch")
    for _ in range(3):
        index = torch.randint(50, (40,), generator=generator)
        priority = torch.randint(0, 2_000, (40,), generator=generator) / 4096
        hardware.set(index, priority)
        host.set(index, priority)
        assert torch.equal(hardware.priorities, host.priorities)
        assert hardware.total == pytest.approx(host.total)
        mine, theirs = hardware.sample(200, 0.4), host.sample(200, 0.4)
        assert (mine.indices == theirs.indices).float().mean() > 0.99  # 24 random bits for 53
        same = mine.indices == theirs.indices
        torch.testing.assert_close(mine.weights[same], theirs.weights[same])


def test_priorities_are_rounded_to_fixed_point() -> None:
    tree = FpgaTree(16, seed=0)
    with pytest.warns(UserWarning, match=r"limits them to 16\. Use a smaller --replay.alpha"):
        tree.set(torch.arange(3), torch.tensor([1e-9, 1.0, 100.0]))
    assert tree.priorities[:3].tolist() == [1 / 4096, 1.0, 65535 / 4096]
    with warnings.catch_warnings():  # only the first one warns
        warnings.simplefilter("error")
        tree.set(torch.tensor([0, 4]), torch.tensor([1e16, 3e38]))
    assert tree.priorities[[0, 4]].tolist() == [65535 / 4096] * 2
    assert tree.saturated == 3
    assert [part.shape for part in tree.sample(0, 0.4)] == [(0,), (0,)]
    with pytest.raises(ValueError, match="-1"):
        tree.set(torch.tensor([3]), torch.tensor([-1.0]))


SHORT_RUN = [
    *("train", "cartpole-dqn", "--replay.manager", "fpga", "--replay.capacity", "512"),
    *("--replay.learning-starts", "64", "--agent.batch", "16", "--launcher", "inline", "--seed", "1"),
]


def test_an_agent_trains_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    sample = FpgaTree.sample

    def counted(self: FpgaTree, count: int, *given: Any, **named: Any) -> Draw:
        drawn.append(count)
        return sample(self, count, *given, **named)

    monkeypatch.setattr(FpgaTree, "sample", counted)
    short = ("--env-steps", "96", "--eval-episodes", "1", "--out", str(tmp_path / "run"))
    assert main([*SHORT_RUN, *short]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert sum(drawn) >= 16 * summary["updates"] > 16 * 4


@pytest.mark.slow
def test_an_agent_learns_through_it(tmp_path: Path) -> None:
    assert main([*SHORT_RUN, "--env-steps", "6000", "--out", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_return_mean"] > 60  # 22 at random
