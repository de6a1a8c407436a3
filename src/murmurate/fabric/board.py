"""A small board of counters that the launcher and all replicas see: who lives, how far, what is asked.

Every cell has one writer (a replica its own column, the launcher the rest), so nothing needs a lock
that a dead process could hold. It works on any int64 buffer: shared memory, or a plain array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_STOP, _CHECKPOINT = 0, 1
_HEADER = 8
_ALIVE, _ENV_STEPS, _CLOCK, _SAVED, _FINISHED = range(5)
_ROWS = 5


class Board:
    """Counters of ``size`` replicas over ``cells``, an int64 array of at least ``cells_needed(size)``."""

    def __init__(self, size: int, cells: npt.NDArray[np.int64] | None = None) -> None:
        if cells is None:
            cells = np.zeros(self.cells_needed(size), dtype=np.int64)
        self.size = size
        self._header = cells[:_HEADER]
        self._rows = cells[_HEADER : self.cells_needed(size)].reshape(_ROWS, size)

    @staticmethod
    def cells_needed(size: int) -> int:
        return _HEADER + _ROWS * size

    def open(self) -> None:
        """Everybody is alive and at zero (the launcher, before it starts the roles)."""
        self._header[:] = 0
        self._rows[:] = 0
        self._rows[_ALIVE] = 1

    # -- replicas write their own column

    def advance(self, rank: int, env_steps: int, clock: int) -> None:
        """This replica has made ``env_steps`` and ``clock`` updates in all."""
        self._rows[_ENV_STEPS, rank] = env_steps
        self._rows[_CLOCK, rank] = clock

    def saved(self, rank: int, request: int) -> None:
        self._rows[_SAVED, rank] = request

    def finished(self, rank: int) -> None:
        """This replica's last step is done and its last vector published."""
        self._rows[_FINISHED, rank] = 1

    # -- the launcher writes the rest

    def bury(self, rank: int) -> None:
        self._rows[_ALIVE, rank] = 0

    def request_stop(self) -> None:
        self._header[_STOP] = 1

    def request_checkpoint(self) -> int:
        self._header[_CHECKPOINT] += 1
        return int(self._header[_CHECKPOINT])

    # -- anybody reads

    def is_alive(self, rank: int) -> bool:
        return bool(self._rows[_ALIVE, rank])

    def living(self) -> Sequence[int]:
        return [int(i) for i in np.flatnonzero(self._rows[_ALIVE])]

    @property
    def stop_requested(self) -> bool:
        return bool(self._header[_STOP])

    @property
    def checkpoint_requested(self) -> int:
        """Number of the newest checkpoint asked for; 0 before the first."""
        return int(self._header[_CHECKPOINT])

    def total_env_steps(self) -> int:
        """Over all replicas, the dead ones' included."""
        return int(self._rows[_ENV_STEPS].sum())

    def env_steps(self, rank: int) -> int:
        return int(self._rows[_ENV_STEPS, rank])

    def clock(self, rank: int) -> int:
        return int(self._rows[_CLOCK, rank])

    def saved_by_all(self, request: int) -> bool:
        """Whether every living replica has written its part of checkpoint ``request``."""
        alive = self._rows[_ALIVE] == 1
        return bool(alive.any() and (self._rows[_SAVED][alive] >= request).all())

    def has_saved(self, rank: int, request: int) -> bool:
        """Whether ``rank`` has written its part of checkpoint ``request``."""
        return bool(self._rows[_SAVED, rank] >= request)

    def finished_all(self, first: int | None = None) -> bool:
        """Whether all living members have finished, or the living among the ``first`` so many."""
        alive = self._rows[_ALIVE, :first] == 1
        return bool((self._rows[_FINISHED, :first][alive] == 1).all())

    def has_finished(self, rank: int) -> bool:
        return bool(self._rows[_FINISHED, rank])
