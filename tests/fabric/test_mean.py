"""Sums that do not depend on who adds."""

from __future__ import annotations

import pytest
import torch

from murmurate.fabric.mean import ordered_mean


def test_it_adds_by_rank_whatever_the_order_given():
    # In float32 (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
    vectors = {0: torch.tensor([1e8]), 1: torch.tensor([1.0]), 2: torch.tensor([-1e8])}
    assert ordered_mean(vectors).item() == 0.0
    assert ordered_mean({rank: vectors[rank] for rank in (0, 2, 1)}).item() == 0.0
    assert ordered_mean({0: vectors[0], 1: vectors[2], 2: vectors[1]}).item() == pytest.approx(1 / 3)
    assert vectors[0].item() == 1e8
