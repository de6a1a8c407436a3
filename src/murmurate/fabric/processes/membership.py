"""The members that take part, from one member's view: those alive in the incarnation that it has admitted.

The run state shows which ranks are alive. There, a restarted rank is alive before its peers have agreed on
when it takes part again; here, only after ``admit``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from murmurate.fabric.processes.run_state import RunState


class Membership:
    """One member's view of all members.

    admitted: False while this member itself waits to be admitted.
    by_agreement: all members admit a joiner at the same round, and send it nothing before. Otherwise they
        communicate with a joiner as soon as it has entered, and strategies are told of it between two steps.
    """

    def __init__(
        self, run_state: RunState, rank: int, admitted: bool = True, by_agreement: bool = False
    ) -> None:
        self.run_state, self.rank, self.admitted, self.by_agreement = run_state, rank, admitted, by_agreement
        self.incarnations = run_state.incarnations()
        if not self.incarnations[rank]:
            # this member was there from the start, so it has admitted the first incarnation of all others: a
            # member that restarted while this one was being built must be admitted like any joiner
            self.incarnations[:] = 0

    def alive(self) -> npt.NDArray[np.bool_]:
        """Whether each member takes part, [size]."""
        alive = self.run_state.alive_in(self.incarnations)
        alive[self.rank] = True
        return alive

    def is_alive(self, rank: int) -> bool:
        """Whether to communicate with ``rank``, or wait for it."""
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

    def newcomers(self) -> list[tuple[int, int]]:
        """(rank, incarnation) of those that have entered, and that this member has not admitted yet."""
        # of one moment: a rank that restarts meanwhile is a newcomer again once it has entered
        incarnations = self.run_state.incarnations()
        changed = [int(rank) for rank in np.flatnonzero(incarnations != self.incarnations)]
        entered = [r for r in changed if self.run_state.is_alive(r) and self.run_state.has_entered(r)]
        return [(rank, int(incarnations[rank])) for rank in entered]


class ChannelMembership:
    """The members of one channel. Its methods take and return positions in ``ranks`` (the fabric's ranks)."""

    def __init__(self, membership: Membership, ranks: Sequence[int]) -> None:
        self._membership, self._run_state = membership, membership.run_state
        self.ranks = np.array(ranks)
        self.rank, self.size = list(ranks).index(membership.rank), len(ranks)

    @property
    def admitted(self) -> bool:
        """Whether this member has been admitted."""
        return self._membership.admitted

    def alive(self) -> npt.NDArray[np.bool_]:
        """Whether each member of the channel takes part, [size]."""
        alive: npt.NDArray[np.bool_] = self._membership.alive()[self.ranks]
        return alive

    def living(self) -> Sequence[int]:
        return [int(rank) for rank in np.flatnonzero(self.alive())]

    def is_alive(self, rank: int) -> bool:
        return self._membership.is_alive(int(self.ranks[rank]))

    def has_finished(self, rank: int) -> bool:
        return self._run_state.has_finished(int(self.ranks[rank]))

    def incarnation(self, rank: int) -> int:
        return self._run_state.incarnation(int(self.ranks[rank]))

    def heartbeat(self) -> None:
        """A sign of life of this member while it waits for others."""
        self._run_state.heartbeat(self._membership.rank, working=False)

    def work(self) -> npt.NDArray[np.int64]:
        """Grows for each member while it works, and not while it waits, [size]."""
        work: npt.NDArray[np.int64] = self._run_state.work()[self.ranks]
        return work
