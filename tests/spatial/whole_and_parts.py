"""Random images, and a function of a whole image beside that of its parts."""

from __future__ import annotations

import torch

from murmurate.bench._spatial_layers import in_parts
from murmurate.spatial import scatter, whole


def image(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def both(grid, function, *tensors):
    """(of the whole, of every part) where ``function`` gets the first tensor scattered."""
    expected = function(*tensors)
    return expected, in_parts(grid, lambda parts: whole(function(scatter(tensors[0], parts), *tensors[1:])))
