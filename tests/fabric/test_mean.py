"""Sums that do not depend on who adds."""

from __future__ import annotations

import pytest
import torch

from murmurate.buffers import as_tensor
from murmurate.fabric.mean import ordered_mean
from murmurate.fabric.network.round import RoundResult


def test_it_adds_by_rank_whatever_the_order_given():
    # In float32 (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
    vectors = {0: torch.tensor([1e8]), 1: torch.tensor([1.0]), 2: torch.tensor([-1e8])}
    assert ordered_mean(vectors).item() == 0.0
    assert ordered_mean({rank: vectors[rank] for rank in (0, 2, 1)}).item() == 0.0
    assert ordered_mean({0: vectors[0], 1: vectors[2], 2: vectors[1]}).item() == pytest.approx(1 / 3)
    assert vectors[0].item() == 1e8


def test_a_mean_that_is_sent_again_leaves_the_one_that_is_being_read():
    data = torch.tensor([4.0, 8.0]).view(torch.uint8).numpy()
    result = RoundResult(1, "mean", [0, 1], data, {}, divisor=4)
    sent = result.divided(torch.float32)
    assert as_tensor(sent.data, torch.float32).tolist() == [1.0, 2.0]
    assert (sent.divisor, result.divisor) == (1, 4)
    assert as_tensor(result.data, torch.float32).tolist() == [4.0, 8.0]
    assert sent.divided(torch.float32) is sent
