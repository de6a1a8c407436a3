"""The relaxed loop: batches are drawn D updates before they are learned from (Zhang, section 4.3.1).

With D = 0 each batch is drawn after the errors of the one before it have become priorities: the strict loop.
With D > 0 the draw of batch t + D needs only the errors up to batch t - 1, so a courier fetches it while
batch t is learned from. Which batch is drawn when depends on D alone, never on how fast that courier is: the
indices are drawn by the caller (microseconds), and the courier only copies what they name. Where there are no
compiled kernels, the caller copies too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from murmurate import native
from murmurate.replay.async_copy import Courier
from murmurate.replay.interface import Replay, Sample
from murmurate.replay.sum_tree import Draw, empty_draw


@dataclass
class _Room:
    """Memory for a batch, and for which transitions it has."""

    batch: Any
    draw: Draw


@dataclass
class _Fetched:
    sample: Sample
    room: _Room | None
    number: int = 0  # what the courier is to be waited for


class Ahead:
    """Batches of ``batch`` transitions from ``replay``, ``depth`` (D) of them ahead.

    What ``next`` returns is valid until it is called again. pinned: in memory that a GPU reads by itself.
    weigh: changes weights [B] that were drawn with that beta, at the moment of the draw.
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
        self._courier = Courier() if depth and native.kernels is not None else None
        self._coming: deque[_Fetched] = deque()
        self._free: list[_Room] = []
        self._lent: _Room | None = None

    def next(self, beta: float) -> Sample:
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None  # once only, should a draw be refused now
        while len(self._coming) <= self.depth:
            self._coming.append(self._fetch(beta))
        fetched = self._coming.popleft()
        self._wait(fetched.number)
        self._lent = fetched.room
        return fetched.sample

    def settle(self) -> None:
        """Return once nothing reads the replay: before what is read may be overwritten."""
        if self._coming:
            self._wait(self._coming[-1].number)

    def _wait(self, number: int) -> None:
        if self._courier is not None:
            self._courier.wait(number)

    def _fetch(self, beta: float) -> _Fetched:
        room = self._free.pop() if self._free else self._new_room()
        chosen = self.replay.choose(self.batch, beta, room.draw)
        self._weigh(chosen.draw.weights, beta)
        sample = self.replay.gather(chosen, room.batch, self._courier)
        return _Fetched(sample, room, 0 if self._courier is None else self._courier.number)

    def _new_room(self) -> _Room:
        return _Room(self.replay.room(self.batch, self.pinned), empty_draw(self.batch))

    def state(self) -> dict[str, Any]:
        """The batches that were drawn and not yet learned from."""
        self.settle()
        coming = [asdict(fetched.sample) for fetched in self._coming]
        # an empty dictionary of tensors has no place in a checkpoint
        return {
            "coming": [{name: x for name, x in one.items() if name != "behaviour" or x} for one in coming]
        }

    def load(self, state: dict[str, Any]) -> None:
        self.settle()
        self._coming = deque(_Fetched(Sample(**saved), None) for saved in state["coming"])

    def close(self) -> None:
        self.settle()
        self._coming.clear()
        self._courier = None
