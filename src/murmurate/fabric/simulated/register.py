"""The register of one simulated publisher: which version each reader sees at a virtual time."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmurate.fabric.interface import FabricError

# when a version arrives: a time for each reader [n], or one for all readers
Arrivals = NDArray[np.float64] | float


class SimulatedRegister:
    """The versions of ``publisher`` that readers may still need. The publisher itself sees each at once."""

    def __init__(self, publisher: int) -> None:
        self._publisher = publisher
        self._latest = 0
        # (version, copy of x, torch's count of writes to the copy, when each reader sees it)
        self._versions: list[tuple[int, Tensor, int, Arrivals]] = []

    def publish(self, x: Tensor, now: float, arrivals: Arrivals) -> int:
        """Copy ``x`` as the next version, which reader ``j`` sees from ``arrivals[j]`` on."""
        with torch.inference_mode(False):  # else torch does not count writes to the copy
            copy = torch.empty_like(x, requires_grad=False).copy_(x.detach())
        self._latest += 1
        self._versions.append((self._latest, copy, copy._version, arrivals))
        if len(self._versions) > 1:
            self._drop_replaced(now)
        return self._latest

    def _drop_replaced(self, now: float) -> None:
        """Drop each version if every reader has a newer one now, or will have when that version arrives."""
        needed: list[tuple[int, Tensor, int, Arrivals]] = []
        newer: Arrivals = math.inf  # when each reader has a newer version
        for version in reversed(self._versions):
            arrivals = version[3]
            if isinstance(arrivals, float) and isinstance(newer, float):
                time = max(arrivals, now)
                is_needed, newer = time < newer, min(newer, time)
            else:
                times = np.maximum(arrivals, now)
                is_needed, newer = bool(np.any(times < newer)), np.minimum(newer, times)
            if is_needed or not needed:
                needed.append(version)
        self._versions = needed[::-1]

    def newest(self, reader: int, now: float) -> tuple[int, Tensor | None]:
        """The (version, vector) that ``reader`` sees; (0, None) before the first version arrives.

        Raises ``FabricError`` if a member has written into the vector, which is read-only.
        """
        for version, x, writes, arrivals in reversed(self._versions):
            if reader == self._publisher or _at(arrivals, reader) <= now:
                if x._version != writes:
                    raise FabricError(f"A peeked vector (version {version}) was written to: copy it first.")
                return version, x
        return 0, None

    def next_arrival(self, reader: int, now: float) -> float:
        """When ``reader`` will see the next version; infinity if none is on its way."""
        times = [_at(arrivals, reader) for *_, arrivals in self._versions]
        return min((time for time in times if time > now), default=math.inf)


def _at(arrivals: Arrivals, reader: int) -> float:
    return arrivals if isinstance(arrivals, float) else float(arrivals[reader])
