"""The relaxed loop: batches are drawn D updates before they are learned from (Zhang, section 4.3.1).

With D = 0 each batch is drawn after the errors of the one before it have become priorities: the strict loop.
With D > 0 the draw of batch t + D needs only the errors up to batch t - 1, so a second thread fetches it
while batch t is learned from. Which batch is drawn when depends on D alone, never on how fast that thread
is: the indices are drawn by the caller (microseconds), and the thread only copies what they name.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from murmurate.replay.interface import Chosen, Replay, Sample


@dataclass
class _Fetched:
    sample: Sample
    room: Any


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
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "replay") if depth else None
        self._coming: deque[concurrent.futures.Future[_Fetched]] = deque()
        self._free: list[Any] = []
        self._lent: Any = None

    def next(self, beta: float) -> Sample:
        if self._lent is not None:
            self._free.append(self._lent)
        if self._thread is None:
            fetched = self._fetch(self._choose(beta), self._take_room())
        else:
            while len(self._coming) <= self.depth:
                self._coming.append(self._thread.submit(self._fetch, self._choose(beta), self._take_room()))
            fetched = self._coming.popleft().result()
        self._lent = fetched.room
        return fetched.sample

    def _choose(self, beta: float) -> Chosen:
        chosen = self.replay.choose(self.batch, beta)
        self._weigh(chosen.draw.weights, beta)
        return chosen

    def settle(self) -> None:
        """Return once no thread reads the replay: before what it reads may be overwritten."""
        if self._coming:
            concurrent.futures.wait(self._coming)

    def _take_room(self) -> Any:
        return self._free.pop() if self._free else self.replay.room(self.batch, self.pinned)

    def _fetch(self, chosen: Chosen, room: Any) -> _Fetched:
        return _Fetched(self.replay.gather(chosen, room), room)

    def state(self) -> dict[str, Any]:
        """The batches that were drawn and not yet learned from."""
        return {"coming": [asdict(future.result().sample) for future in self._coming]}

    def load(self, state: dict[str, Any]) -> None:
        self._coming.clear()
        for saved in state["coming"]:
            future: concurrent.futures.Future[_Fetched] = concurrent.futures.Future()
            future.set_result(_Fetched(Sample(**saved), None))
            self._coming.append(future)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
