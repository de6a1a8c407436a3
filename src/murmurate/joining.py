"""How a member that was started again comes in: with the state of a living peer, never an initial one.

The launcher asks for a hand-over on the board (``HandOver``): who gives, who joins. The donor writes what it
has learned between two of its steps, and the joiner, which was built meanwhile and waits, takes it. Members
with common rounds let the joiner in at one and the same round; the others when they see that it has entered.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

from murmurate.checkpoint import read_part, write_part
from murmurate.fabric.board import Board, HandOver
from murmurate.fabric.interface import Capability
from murmurate.moments import entries
from murmurate.replicator import Bond, Replicator

_POLL_SECONDS = 0.002
_KEPT, _EVERY = 128, 8
_QUANTILE = 0.95


class NotLetIn(Exception):
    """The run ended before this joiner was in it."""


def folder_of(folder: Path, number: int) -> Path:
    """Where the state of hand-over ``number`` lies while it is on its way."""
    return folder / "checkpoints" / f".staging-hand-over-{number}"


def give(folder: Path, board: Board, asked: HandOver, state: dict[str, Any]) -> None:
    """Write ``state`` for the joiner of ``asked``. Raises RunFailed when the disk is full."""
    write_part(folder_of(folder, asked.number), asked.donor, state)
    board.gave(asked.donor, asked.number)


def take(folder: Path, board: Board, rank: int) -> tuple[HandOver, dict[str, Any]]:
    """Say that this joiner is ready, and wait for what is handed to it.

    Raises NotLetIn if the run stops first. Whether it waits in vain is the launcher's to see: it asks
    another donor, or ends this process.
    """
    board.ready(rank)
    while not board.stop_requested:
        board.beat(rank)
        asked = HandOver.unpack(board.hand_over)
        mine = (asked.joiner, asked.life) == (rank, board.life(rank))
        if asked.number and mine and board.has_given(asked.donor, asked.number):
            state = read_part(folder_of(folder, asked.number), asked.donor)
            shutil.rmtree(folder_of(folder, asked.number), ignore_errors=True)
            return asked, state
        time.sleep(_POLL_SECONDS)
    raise NotLetIn


def adopted(replicator: Replicator, theirs: dict[str, Any], clock: int) -> dict[str, Any]:
    """A peer's ``Replicator.state()`` as this joiner loads it.

    What lies in memory that all share has gone on since the peer wrote, and is kept as it is; there the
    clock, too, goes on from this rank's own count ``clock``, which others add up.
    """
    if Capability.SHARED_MEMORY not in replicator.strategy.needs:
        return theirs
    return {name: _but_shared(bond, theirs[name], clock) for name, bond in replicator.bonds.items()}


def _but_shared(bond: Bond, theirs: dict[str, Any], clock: int) -> dict[str, Any]:
    replica = bond.replica
    present = {
        f"{index}.{key}": value
        for index, (_, memory) in enumerate(entries(replica.optimizer))
        for key, value in memory.items()
    }
    kept = {
        "params": dict(replica.named_views()),
        # moments exist before the first step only where they are shared
        "optimizer": present or theirs["replica"]["optimizer"],
        "clock": clock,
    }
    return {**theirs, "replica": {**theirs["replica"], **kept}}


class Pace:
    """A high quantile of this member's latest round times; one outlier, as a pause by a signal, is none."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._last: float | None = None
        self._turn = 0

    def tick(self) -> float | None:
        """At the end of each round: seconds, now and then; None in between."""
        now = time.monotonic()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now
        self._turn += 1
        if self._turn % _EVERY or len(self._times) < _EVERY - 1:
            return None
        ordered = sorted(self._times)
        return ordered[min(int(_QUANTILE * len(ordered)), len(ordered) - 1)]
