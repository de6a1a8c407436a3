"""Converts the arrays in nested dicts and lists to tensors, as checkpoints hold them, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: to_tensors(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [to_tensors(value) for value in tree]
    return torch.from_numpy(tree) if isinstance(tree, np.ndarray) else tree


def to_arrays(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: to_arrays(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [to_arrays(value) for value in tree]
    return tree.numpy() if isinstance(tree, Tensor) else tree
