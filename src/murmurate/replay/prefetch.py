"""The relaxed loop: batches are drawn D updates before they are used (Zhang 2022, section 4.3.1).

With D = 0 each batch is drawn after the errors of the previous one have become priorities: the strict loop.
With D > 0 the draw of batch t + D needs only the errors up to batch t - 1, so a background thread copies that
batch during the update on batch t. The order of draws depends on D alone, never on the speed of the thread:
the caller draws the indices (microseconds), and the thread only copies the data. Without compiled kernels the
caller also copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from murmurate import native
from murmurate.replay.async_copy import AsyncCopy
from murmurate.replay.interface import Replay, Sample
from murmurate.replay.tree import Draw, empty_draw


@dataclass
class _Buffers:
    """Memory for a batch, and for the indices and weights of its draw."""

    batch: Any
    draw: Draw


@dataclass
class _Fetched:
    """A drawn batch. buffers: the memory in which it lies; None if it was loaded from a checkpoint."""

    sample: Sample
    buffers: _Buffers | None
    number: int = 0  # of its last copy, for ``AsyncCopy.wait``; 0: nothing is to be waited for


class Prefetcher:
    """Batches of ``batch`` transitions from ``replay``, drawn ``depth`` (D) batches ahead.

    A sample is valid until the next call of ``next``. pinned: whether batches lie in page-locked memory.
    weigh: called at each draw with (weights [B], beta); may change the weights in place.

    Raises ValueError for a negative depth.
    """

    def __init__(
        self,
        replay: Replay,
        batch: int,
        depth: int,
        pinned: bool = False,
        weigh: Callable[[Tensor, float], None] = lambda weights, beta: None,
    ) -> None:
        if depth < 0:
            raise ValueError(f"batches are drawn at least 0 updates ahead, not {depth}")
        self._weigh = weigh
        self.replay, self.batch, self.depth, self.pinned = replay, batch, depth, pinned
        self._copier = AsyncCopy() if depth and native.kernels is not None else None
        self._coming: deque[_Fetched] = deque()  # drawn and not yet returned
        self._free: list[_Buffers] = []
        self._in_use: _Buffers | None = None

    def next(self, beta: float) -> Sample:
        """The next batch. beta: exponent of the importance weights of the batches that this call draws.

        Raises ValueError if the replay holds fewer than ``batch`` transitions.
        """
        if self._in_use is not None:
            self._free.append(self._in_use)
            self._in_use = None  # freed only once, even if the draw below raises
        while len(self._coming) <= self.depth:
            self._coming.append(self._fetch(beta))
        fetched = self._coming.popleft()
        self._wait(fetched.number)
        self._in_use = fetched.buffers
        return fetched.sample

    def drain(self) -> None:
        """Wait until no copy reads the replay any more; to be called before slots may be overwritten."""
        if self._coming:
            self._wait(self._coming[-1].number)

    def _wait(self, number: int) -> None:
        if self._copier is not None:
            self._copier.wait(number)

    def _fetch(self, beta: float) -> _Fetched:
        buffers = self._free.pop() if self._free else self._new_buffers()
        selection = self.replay.choose(self.batch, beta, buffers.draw)
        self._weigh(selection.draw.weights, beta)
        sample = self.replay.gather(selection, buffers.batch, self._copier)
        return _Fetched(sample, buffers, 0 if self._copier is None else self._copier.number)

    def _new_buffers(self) -> _Buffers:
        return _Buffers(self.replay.buffers(self.batch, self.pinned), empty_draw(self.batch))

    def state(self) -> dict[str, Any]:
        """The batches that were drawn and not yet returned by ``next``."""
        self.drain()
        return {"coming": [asdict(fetched.sample) for fetched in self._coming]}

    def load(self, state: dict[str, Any]) -> None:
        """Return the batches of ``state`` first. Batches that were drawn before are dropped."""
        self.drain()
        self._coming = deque(_Fetched(Sample(**saved), None) for saved in state["coming"])

    def close(self) -> None:
        """Drop the batches that were drawn, and end the thread."""
        self.drain()
        self._coming.clear()
        self._copier = None
