"""Where the ranks of a crew meet: board and fabric, in one host's memory or across hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from murmurate.fabric.arena import Arena
from murmurate.fabric.board import Board
from murmurate.fabric.interface import FabricFactory
from murmurate.fabric.processes import ProcessFabric
from murmurate.fabric.store_board import StoreBoard
from murmurate.launch._crew import Crew, Plan
from murmurate.launch._ground import Process, this_host
from murmurate.launch.role import open_board


class Ground:
    """What one process of a crew stands on; ``mine`` are the members that live in it."""

    def __init__(self, us: Crew, plan: Plan, members: int, mine: Sequence[int]) -> None:
        self._us, self._plan, self._members = us, plan, members
        self._arenas: list[Arena] = []
        same = plan.leader.host == this_host()
        # one clock for all processes of a host; another host's begins when it hears of the plan
        self.started_at = plan.seconds if same else time.monotonic()
        self.board: Board
        if plan.fabric == "processes":
            self.board = open_board(self._arena(), members)
            if us.leads:
                self.board.open()
        else:
            self.board = StoreBoard(members, us.store.clone(), mine, us.leads)

    def door(self, rank: int) -> FabricFactory:
        """The fabric of ``rank``, a member of this process."""
        if self._plan.fabric == "processes":
            arena = self._arena()
            open_board(arena, self._members)  # its regions begin after the board's
            return ProcessFabric(arena, self.board, rank)
        raise NotImplementedError

    def is_gone(self, rank: int, process: Process, silent_seconds: float) -> bool:
        """Whether the process of ``rank`` has ended or, on another host, was silent for so long."""
        gone = process.is_gone()
        if gone is None and isinstance(self.board, StoreBoard):
            return self.board.silent_seconds(rank) > silent_seconds
        return bool(gone)

    def flush(self) -> None:
        """Let the others see what was last written to the board."""
        if isinstance(self.board, StoreBoard):
            self.board.exchange()

    def close(self) -> None:
        if isinstance(self.board, StoreBoard):
            self.board.close()
        for arena in self._arenas:
            arena.close()

    def _arena(self) -> Arena:
        self._arenas.append(self._us.arena())
        return self._arenas[-1]
