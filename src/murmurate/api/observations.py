"""Observations of any form, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate.errors import Refusal


def without_tensors(observation: Any) -> Any:
    """``observation`` with tensors as arrays, also those in mappings, tuples and lists: gymnasium's discrete
    spaces contain no tensor."""
    if isinstance(observation, Tensor):
        values = observation.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # NumPy has no bfloat16
    if isinstance(observation, Mapping):
        return {key: without_tensors(part) for key, part in observation.items()}
    if isinstance(observation, (list, tuple)):
        parts = map(without_tensors, observation)
        return tuple(parts) if isinstance(observation, tuple) else list(parts)
    return observation


def array_of(observation: Any) -> npt.NDArray[Any] | None:
    """``observation`` as an array; None for one of a Dict or Tuple space, and a list of these."""
    if isinstance(observation, (dict, tuple)) and not (
        isinstance(observation, tuple) and all(np.isscalar(x) for x in observation)
    ):
        return None
    try:
        array = np.asarray(observation)
    except ValueError:  # the parts differ in shape
        return None
    return None if array.dtype == object else array


def mask_of(ended: Any, size: int) -> npt.NDArray[np.bool_]:
    """``ended`` as an array [size]. Raises Refusal for another number of rows."""
    mask = np.asarray(without_tensors(ended), np.bool_).ravel()
    if len(mask) != size:
        raise Refusal(f"ended has {len(mask)} rows, and the last observations had {size}.")
    return mask


def pair_hint(observation: Any) -> str:
    """A sentence, after a space, for what an environment's ``reset`` returns in place of an observation."""
    is_pair = isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict)
    return " reset() returns (observation, info): pass the first of the two." if is_pair else ""
