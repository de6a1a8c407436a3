"""Who takes part, as one member sees it: those alive in the life in which this member let them in.

The board says who is alive. A rank that died and was started again is alive there before its peers have
agreed from when on it counts, and counts here only from ``admit`` on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from murmurate.fabric.processes.run_state import Board


class Roster:
    """One member's view. ``inside`` is False while this member itself waits to be let in.

    by_agreement: all members let a joiner in at one common round, and do not speak with it before; otherwise
        a member that has entered is spoken with at once, and told to strategies between two steps.
    """

    def __init__(self, board: Board, rank: int, inside: bool = True, by_agreement: bool = False) -> None:
        self.board, self.rank, self.inside, self.by_agreement = board, rank, inside, by_agreement
        self.lives = board.lives()

    def alive(self) -> npt.NDArray[np.bool_]:
        """[size]"""
        found = self.board.alive_in(self.lives)
        found[self.rank] = True
        return found

    def is_alive(self, rank: int) -> bool:
        """Whether there is any use in speaking with ``rank``, or in waiting for it."""
        if rank == self.rank:
            return True
        if self.by_agreement:
            return bool(self.board.is_alive(rank) and self.board.life(rank) == self.lives[rank])
        return bool(self.board.is_alive(rank) and self.board.has_entered(rank))

    def living(self) -> Sequence[int]:
        return [int(rank) for rank in np.flatnonzero(self.alive())]

    def admit(self, rank: int, life: int) -> None:
        self.lives[rank] = life

    def group(self, ranks: Sequence[int]) -> Group:
        return Group(self, ranks)

    def newcomers(self) -> list[int]:
        """Ranks that have entered in a life in which this member has not let them in yet."""
        changed = np.flatnonzero(self.board.lives() != self.lives)
        return [int(r) for r in changed if self.board.is_alive(int(r)) and self.board.has_entered(int(r))]


class Group:
    """Members of one channel, by their positions among its ``ranks``."""

    def __init__(self, roster: Roster, ranks: Sequence[int]) -> None:
        self._roster, self._board = roster, roster.board
        self.ranks = np.array(ranks)
        self.rank, self.size = list(ranks).index(roster.rank), len(ranks)

    @property
    def inside(self) -> bool:
        """Whether this member has been let in."""
        return self._roster.inside

    def alive(self) -> npt.NDArray[np.bool_]:
        """[size]"""
        found: npt.NDArray[np.bool_] = self._roster.alive()[self.ranks]
        return found

    def living(self) -> Sequence[int]:
        return [int(rank) for rank in np.flatnonzero(self.alive())]

    def is_alive(self, rank: int) -> bool:
        return self._roster.is_alive(int(self.ranks[rank]))

    def has_finished(self, rank: int) -> bool:
        return self._board.has_finished(int(self.ranks[rank]))

    def life(self, rank: int) -> int:
        return self._board.life(int(self.ranks[rank]))

    def beat(self) -> None:
        self._board.beat(self._roster.rank)


__all__ = ["Group", "Roster"]
