"""A run state across hosts: a copy in each process, synchronized through a c10d store.

Every cell has one writer, so there are no conflicts: a thread pushes this process's columns when they have
changed, and pulls all others in one request. A copy is late by one or two of these exchanges, which the users
of a run state tolerate: they act on a request when they see it. Each push carries a heartbeat, which
distinguishes an idle process from a silent one. A value that was not signed by its member is ignored, so the
member then counts as silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from murmurate.fabric.awake import AwakeClock
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network.authenticated_store import AuthenticatedStore, Unauthentic
from murmurate.fabric.processes.run_state import LAUNCHER_ROWS, MEMBER_ROWS, RunState

_CYCLE_SECONDS = 0.05  # between two exchanges
_HEARTBEAT_SECONDS = 1.0
_REFUSED_SECONDS = 3.0  # how long to wait for a valid value of a leader that seems to have another secret


class StoreRunState(RunState):
    """The run state of ``size`` members in one process, which writes the columns of its own ranks, ``mine``.

    leads: this process also writes the launcher's cells (stop, checkpoint, which members are alive).
    counts: see ``set_counts``.
    store: must have a connection of its own (a clone of the c10d store), as other waits on the same
    connection would delay the run state.

    Raises FabricError if the leader has not opened the run state within ``deadline_seconds``, Unauthentic if
    it was opened with another secret, and RuntimeError if the store does not answer.
    """

    def __init__(
        self,
        size: int,
        store: AuthenticatedStore,
        mine: Sequence[int],
        leads: bool,
        deadline_seconds: float = 60.0,
        counts: Sequence[tuple[int, int]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        cells = np.zeros(self.cells_needed(size), dtype=np.int64)
        super().__init__(size, cells)
        self._store, self._mine, self._leads = store, tuple(mine), leads
        self._theirs = [rank for rank in range(size) if rank not in self._mine]
        self._keys = [_column(rank) for rank in self._theirs] + ([] if leads else [_HEADER_KEY])
        # by key: what was pushed and pulled last
        self._pushed: dict[str, bytes] = {}
        self._pulled: dict[str, bytes] = {}
        self._clock = AwakeClock(clock)
        # the last heartbeat under each key, and when it arrived
        self._beats = dict.fromkeys(self._keys, (0, self._clock.now()))
        self._beat, self._beat_at = 0, 0.0  # this process's heartbeat
        self.lost = False  # the store has failed: nothing is pushed or pulled any more
        self._closing = threading.Event()
        self._exchanging = threading.Lock()
        self._thread: threading.Thread | None = None
        if leads:
            self.open()
        self.set_counts(counts)
        if leads:
            for rank in self._theirs:  # until its own process writes this column
                self._store.set(_column(rank), np.append(self._rows[MEMBER_ROWS, rank], 0).tobytes())
            self._start()
        else:
            self._await_leader(deadline_seconds)

    # -- the other processes

    @property
    def refused(self) -> int:
        """How many values were refused, as their member had not signed them."""
        return self._store.refused

    def silent_seconds(self, rank: int) -> float:
        """Time since the last heartbeat of the process that writes column ``rank``, without that for which
        this process was stopped; 0 if this one writes it."""
        return self._silence(_column(rank))

    def leader_silent_seconds(self) -> float:
        """Time since the last heartbeat of the process that leads; 0 if this one does."""
        return self._silence(_HEADER_KEY)

    def _silence(self, key: str) -> float:
        return self._clock.now() - self._beats[key][1] if key in self._beats else 0.0

    def close(self) -> None:
        """Push the last changes, and stop."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.exchange()

    # -- the exchange

    def exchange(self) -> bool:
        """Push and pull once, now; False if the store does not answer, or has failed before."""
        with self._exchanging:
            if self.lost:
                return False
            try:
                self._push()
                self._pull()
            except (RuntimeError, OSError):
                self.lost = True  # a broken connection to a store is never repaired
            return not self.lost

    def _start(self) -> None:
        """Exchange once, then in a thread. Raises FabricError if the store does not answer."""
        if not self.exchange():
            raise FabricError("the store of this run does not answer: look at the host on which it runs")
        self._thread = threading.Thread(target=self._synchronize, name="run_state", daemon=True)
        self._thread.start()

    def _await_leader(self, deadline_seconds: float) -> None:
        """Wait until the leader has opened the run state, and start. Raises FabricError or Unauthentic."""
        until = time.monotonic() + deadline_seconds
        refused: Unauthentic | None = None
        while True:
            try:
                if self._store.check(_HEADER_KEY):
                    self._store.get(_HEADER_KEY)
                    return self._start()
            except Unauthentic as problem:
                # a stranger wrote the value, which the leader will replace; or our secret is not the leader's
                until = min(until, time.monotonic() + _REFUSED_SECONDS) if refused is None else until
                refused = problem
            if time.monotonic() > until:
                silent = FabricError(
                    "the leader (rank 0, or the command) did not open the run state within "
                    f"{deadline_seconds:g} s: look at its log or output"
                )
                raise refused or silent
            time.sleep(_CYCLE_SECONDS)

    def _synchronize(self) -> None:
        while not self._closing.wait(_CYCLE_SECONDS) and self.exchange():
            pass

    def _push(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= _HEARTBEAT_SECONDS:
            self._beat, self._beat_at = self._beat + 1, now
        for rank in self._mine:
            self._set(_column(rank), self._rows[MEMBER_ROWS, rank])
        if self._leads:
            self._set(_HEADER_KEY, np.concatenate([self._header, *self._rows[list(LAUNCHER_ROWS)]]))

    def _set(self, key: str, cells: np.ndarray) -> None:
        content = np.append(cells, self._beat).tobytes()
        if self._pushed.get(key) != content:
            self._store.set(key, content)
            self._pushed[key] = content

    def _pull(self) -> None:
        now = self._clock.now()
        for key, value in zip(self._keys, self._store.values(self._keys) if self._keys else [], strict=True):
            if self._pulled.get(key) == value:
                continue
            self._pulled[key] = value
            try:
                content = np.frombuffer(self._store.authenticated(key, value), dtype=np.int64)
            except Unauthentic as problem:
                self._store.refuse(problem)
                continue
            cells, beat = content[:-1], int(content[-1])
            if key == _HEADER_KEY:
                self._header[:] = cells[: len(self._header)]
                self._rows[list(LAUNCHER_ROWS)] = cells[len(self._header) :].reshape(-1, self.size)
            else:
                self._rows[MEMBER_ROWS, self._theirs[self._keys.index(key)]] = cells
            if beat != self._beats[key][0]:
                self._beats[key] = beat, now


_HEADER_KEY = "run_state/launcher"


def _column(rank: int) -> str:
    return f"run_state/{rank}"
