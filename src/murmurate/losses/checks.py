"""Rank and shape checks that every loss makes before it computes anything."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rank(rank: int, **tensors: Tensor) -> None:
    """Raise ``ValueError`` unless each named tensor has ``rank`` dimensions."""
    for name, x in tensors.items():
        if x.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions, but its shape is {list(x.shape)}")


def check_shape(shape: torch.Size, like: str, **tensors: Tensor) -> None:
    """Raise ``ValueError`` unless each named tensor has exactly ``shape``; nothing is broadcast."""
    for name, x in tensors.items():
        if x.shape != shape:
            raise ValueError(f"{name} must be shaped {list(shape)} like {like}, but it is {list(x.shape)}")


def check_kind(dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise ``ValueError`` unless each named tensor is of ``dtype``."""
    for name, x in tensors.items():
        if x.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, but it is {x.dtype}")


def check_bool(**tensors: Tensor) -> None:
    """Raise ``ValueError`` unless each named tensor is of dtype bool."""
    for name, x in tensors.items():
        if x.dtype != torch.bool:
            raise ValueError(f"{name} must be a bool tensor, but it is {x.dtype}; compare it with 0 first")
