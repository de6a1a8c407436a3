"""The script that docs/replicator.md shows under "Save and resume"."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import murmurate

PAGE = Path(__file__).parents[2] / "docs" / "replicator.md"
STEP = """
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
"""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def batches(steps: int) -> Iterator[Tensor]:
    """``steps`` of 250 batches; whoever loads one draws a number, as a DataLoader's iterator does."""
    rows = torch.Generator().manual_seed(1)
    for _ in range(steps):
        torch.rand(1)
        yield torch.randn(4, 3, generator=rows)


@pytest.fixture
def shown() -> dict[str, Any]:
    """What the page's code defines, with the step that it leaves out; ``main`` returns the parameters."""
    (code,) = re.findall(r"^```python\n(def newest.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"Counter": Counter, "Path": Path, "torch": torch}
    names |= {"make_model": make_model, "batches": batches}
    exec(code.replace("        ...\n", STEP) + "    return replicator.agreed()\n", names)
    return names


def test_a_resumed_script_ends_with_the_bits_of_one_that_was_not_interrupted(
    shown: dict[str, Any], tmp_path: Path
) -> None:
    def trained(folder: str, steps: int) -> dict[str, Tensor]:
        main = functools.partial(shown["main"], folder=tmp_path / folder, steps=steps)
        (parameters,) = murmurate.run(main, replicas=1, launcher="inline")
        return parameters

    trained("interrupted", 150)
    resumed, whole = trained("interrupted", 250), trained("whole", 250)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert sorted(file.name for file in (tmp_path / "interrupted").iterdir()) == ["100-0.pt", "200-0.pt"]


def test_replicas_resume_from_the_last_step_that_all_have_saved(
    shown: dict[str, Any], tmp_path: Path
) -> None:
    assert shown["newest"](tmp_path, 2) == 0
    for name in ("100-0.pt", "100-1.pt", "200-0.pt", "200-1.pt", "300-0.pt", "300-1.new"):
        (tmp_path / name).touch()
    assert shown["newest"](tmp_path, 2) == 200
