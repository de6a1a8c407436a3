"""Who takes part, as one member sees it: those alive in the incarnation in which this member let them in.

The run state says who is alive. A rank that died and was started again is alive there before its peers have
agreed from when on it counts, and counts here only from ``admit`` on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from murmurate.fabric.processes.run_state import RunState


class Membership:
    """One member's view. ``inside`` is False while this member itself waits to be let in.

    by_agreement: all members let a joiner in at one common round, and do not speak with it before; otherwise
        a member that has entered is spoken with at once, and told to strategies between two steps.
    """

    def __init__(
        self, run_state: RunState, rank: int, inside: bool = True, by_agreement: bool = False
    ) -> None:
        self.run_state, self.rank, self.inside, self.by_agreement = run_state, rank, inside, by_agreement
        self.incarnations = run_state.incarnations()

    def alive(self) -> npt.NDArray[np.bool_]:
        """[size]"""
        found = self.run_state.alive_in(self.incarnations)
        found[self.rank] = True
        return found

    def is_alive(self, rank: int) -> bool:
        """Whether there is any use in speaking with ``rank``, or in waiting for it."""
        if rank == self.rank:
            return True
        if self.by_agreement:
            return bool(
                self.run_state.is_alive(rank) and self.run_state.incarnation(rank) == self.incarnations[rank]
            )
        return bool(self.run_state.is_alive(rank) and self.run_state.has_entered(rank))

    def living(self) -> Sequence[int]:
        return [int(rank) for rank in np.flatnonzero(self.alive())]

    def admit(self, rank: int, incarnation: int) -> None:
        self.incarnations[rank] = incarnation

    def group(self, ranks: Sequence[int]) -> Group:
        return Group(self, ranks)

    def newcomers(self) -> list[int]:
        """Ranks that have entered in a incarnation in which this member has not let them in yet."""
        changed = np.flatnonzero(self.run_state.incarnations() != self.incarnations)
        return [
            int(r) for r in changed if self.run_state.is_alive(int(r)) and self.run_state.has_entered(int(r))
        ]


class Group:
    """Members of one channel, by their positions among its ``ranks``."""

    def __init__(self, membership: Membership, ranks: Sequence[int]) -> None:
        self._membership, self._run_state = membership, membership.run_state
        self.ranks = np.array(ranks)
        self.rank, self.size = list(ranks).index(membership.rank), len(ranks)

    @property
    def inside(self) -> bool:
        """Whether this member has been let in."""
        return self._membership.inside

    def alive(self) -> npt.NDArray[np.bool_]:
        """[size]"""
        found: npt.NDArray[np.bool_] = self._membership.alive()[self.ranks]
        return found

    def living(self) -> Sequence[int]:
        return [int(rank) for rank in np.flatnonzero(self.alive())]

    def is_alive(self, rank: int) -> bool:
        return self._membership.is_alive(int(self.ranks[rank]))

    def has_finished(self, rank: int) -> bool:
        return self._run_state.has_finished(int(self.ranks[rank]))

    def incarnation(self, rank: int) -> int:
        return self._run_state.incarnation(int(self.ranks[rank]))

    def heartbeat(self) -> None:
        self._run_state.heartbeat(self._membership.rank)


__all__ = ["Group", "Membership"]
