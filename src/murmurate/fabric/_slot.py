"""A simulated publisher's register: which of its versions each reader can see at a virtual time."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmurate.fabric.interface import FabricError


class Slot:
    """Keeps the versions of one publisher that some of ``size`` readers may still have to see."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._latest = 0
        # version, copy of x, its write counter, when each reader gets it [size]
        self._versions: list[tuple[int, Tensor, int, NDArray[np.float64]]] = []

    def put(self, x: Tensor, now: float, arrivals: NDArray[np.float64]) -> int:
        """Copy ``x`` as the next version, to be seen by reader ``j`` from ``arrivals[j]`` on."""
        with torch.inference_mode(False):  # else the copy has no write counter
            copy = torch.empty_like(x, requires_grad=False).copy_(x.detach())
        self._latest += 1
        self._versions.append((self._latest, copy, copy._version, arrivals))
        # Done with is a version that every reader has replaced by the time it gets it.
        times = np.maximum(np.stack([a for *_, a in self._versions]), now)
        later = np.vstack([times[1:], np.full(self._size, math.inf)])
        newer = np.minimum.accumulate(later[::-1])[::-1]
        wanted: list[bool] = np.any(times < newer, axis=1).tolist()
        wanted[-1] = True
        self._versions = [v for v, keep in zip(self._versions, wanted, strict=True) if keep]
        return self._latest

    def newest(self, reader: int, now: float) -> tuple[int, Tensor | None]:
        """(version, vector) that ``reader`` sees; (0, None) before the first arrives.

        Raises ``FabricError`` if anybody has written into the vector: peeks are read-only.
        """
        for version, x, writes, arrivals in reversed(self._versions):
            if arrivals[reader] <= now:
                if x._version != writes:
                    raise FabricError(f"A peeked vector (version {version}) was written to: copy it first.")
                return version, x
        return 0, None

    def next_arrival(self, reader: int, now: float) -> float:
        return min((float(a[reader]) for *_, a in self._versions if a[reader] > now), default=math.inf)
