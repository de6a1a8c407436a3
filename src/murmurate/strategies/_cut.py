"""A consistent cut through a strategy's mail, so that a checkpoint holds each delta exactly once.

Chandy and Lamport's markers, drained: before a member saves number k it sends a marker k to everybody it
sends deltas to, and takes in what its senders sent before theirs. What they send after it is held back until
the own state is saved. Then nothing is in flight across the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from murmurate.fabric.interface import Fabric, Letter

_PATIENCE_SECONDS = 0.02


class Cut:
    """All mail under ``tag`` goes through here. Notes of deltas are 0 or more; a marker k has note -k."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._held: list[tuple[int, Letter]] = []  # with the marker that its sender had sent before it
        self._marks: dict[int, int] = {}
        self._saved = 0

    def receive(self, fabric: Fabric, wait_seconds: float = 0.0) -> Letter | None:
        """The next delta from this side of the cut, or None."""
        held = self._next_held()
        if held is not None:
            return held
        while True:
            found = fabric.wait(self.tag, wait_seconds) if wait_seconds else fabric.receive(self.tag)
            if found is None:
                return None
            wait_seconds = 0.0  # after a marker the caller has something else to do than to wait on
            if found.note < 0:
                self._marks[found.sender] = int(-found.note)
            elif self._marks.get(found.sender, 0) > self._saved:
                self._held.append((self._marks[found.sender], found))
            else:
                return found

    def announce(self, fabric: Fabric, number: int, to: Iterable[int], like: Tensor) -> None:
        """Tell them that what comes from here from now on belongs after checkpoint ``number``."""
        for peer in to:
            fabric.send(peer, self.tag, torch.zeros_like(like), note=-float(number))

    def drain(
        self,
        fabric: Fabric,
        number: int,
        senders: Iterable[int],
        absorb: Callable[[Letter], None],
        deadline_seconds: float,
    ) -> bool:
        """Absorb all that the living among ``senders`` sent before their marker; False at the deadline.

        Either way the cut lies behind us afterwards, and what was held is delivered.
        """
        silent = 0.0
        awaited = set(senders)
        # a sender may have passed a cut that was skipped here: what it sent since then is before this one
        self._saved = max(self._saved, number - 1)
        while any(self._marks.get(j, 0) < number for j in awaited & set(fabric.living())):
            letter = self.receive(fabric, _PATIENCE_SECONDS)
            if letter is not None:
                absorb(letter)
                continue
            silent += _PATIENCE_SECONDS
            if silent > deadline_seconds:
                break
        while (letter := self._next_held()) is not None:
            absorb(letter)
        self._saved = number
        return silent <= deadline_seconds

    def _next_held(self) -> Letter | None:
        """The first of those held that is on this side of the cut."""
        for index, (mark, letter) in enumerate(self._held):
            if mark <= self._saved:
                del self._held[index]
                return letter
        return None
