"""Gradients are clipped exactly as by torch, bit for bit."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from murmurate.replica.clipping import NotFinite, check_loss, clip_


def around(value):
    """``value`` and the floats next to it."""
    value = np.float32(value)
    return [np.nextafter(value, np.float32(0)), value, np.nextafter(value, np.float32(1e9))]


@pytest.mark.parametrize("norm", [*around(1.0 - 1e-6), *around(1.0), 0.0, 0.3, 7.0])
def test_as_torch_clips(norm):
    ours, theirs = torch.tensor([float(norm), 0.0]), nn.Parameter(torch.zeros(2))
    theirs.grad = ours.clone()
    reported = nn.utils.clip_grad_norm_([theirs], 1.0)
    assert clip_(ours, 1.0, "x", 3).item() == reported.item() == np.float32(norm)
    assert torch.equal(ours, theirs.grad)


def test_random_gradients_as_torch_clips():
    generator = torch.Generator().manual_seed(0)
    clipped = 0
    for _ in range(200):
        ours = torch.randn(50, generator=generator)
        most = float(torch.linalg.vector_norm(ours)) * (
            1 + 1e-7 * float(torch.randn((), generator=generator))
        )
        theirs = nn.Parameter(torch.zeros(50))
        theirs.grad = ours.clone()
        nn.utils.clip_grad_norm_([theirs], most)
        clipped += not torch.equal(ours, theirs.grad)
        clip_(ours, most, "x", 3)
        assert torch.equal(ours, theirs.grad)
    assert 0 < clipped < 200


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_named(bad):
    with pytest.raises(NotFinite, match="gradient of replica 'actor' is not finite at its update 7"):
        clip_(torch.tensor([1.0, bad]), 1.0, "actor", 7)
    with pytest.raises(NotFinite, match=f"loss of replica 'actor' is {bad} at its update 7"):
        check_loss(torch.tensor(bad), "actor", 7)
