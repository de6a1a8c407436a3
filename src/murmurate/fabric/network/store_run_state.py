"""A run state whose cells live on many hosts: a copy in each process, kept alike through a c10d store.

Every cell has one writer, so there is nothing to agree on: a thread pushes this process's columns when they
have changed and pulls the others', all in one request a turn. A copy is late by a turn or two, which the
users of a run state bear: they act on a request when they see it. Each push carries a beat, so that a silent
process can be told from an idle one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from murmurate.fabric.interface import FabricError
from murmurate.fabric.processes.run_state import LAUNCHERS_ROWS, MEMBERS_ROWS, RunState

_TURN_SECONDS = 0.05
_BEAT_SECONDS = 1.0


class StoreRunState(RunState):
    """The run state of ``size`` members, seen from the process that writes the columns ``mine``.

    leads: this process also writes what a launcher writes (stop, checkpoint, who lives).
    store: must be a connection of its own (``store.clone()``): a wait on it would hold up the run state.
    Raises FabricError if the leader has not opened the run state within ``deadline_seconds``.
    """

    def __init__(
        self, size: int, store: Store, mine: Sequence[int], leads: bool, deadline_seconds: float = 60.0
    ) -> None:
        cells = np.zeros(self.cells_needed(size), dtype=np.int64)
        super().__init__(size, cells)
        self._store, self._mine, self._leads = store, tuple(mine), leads
        self._theirs = [rank for rank in range(size) if rank not in self._mine]
        self._shown: dict[str, bytes] = {}
        self._beats = dict.fromkeys(self._theirs, (0, time.monotonic()))
        self._beat, self._beat_at = 0, 0.0
        self._lost = False
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        if leads:
            self.open()
        else:
            self._await_leader(deadline_seconds)

    def open(self) -> None:
        super().open()
        if self._leads and self._thread is None:
            for rank in self._theirs:
                self._show(_column(rank), np.zeros(_COLUMN, dtype=np.int64))
            self._start()

    # -- what a copy knows about the others

    def silent_seconds(self, rank: int) -> float:
        """Since the process that writes column ``rank`` was last heard of; 0 for an own one."""
        if rank in self._mine:
            return 0.0
        return time.monotonic() - self._beats[rank][1]

    @property
    def lost(self) -> bool:
        """Whether the store has failed to answer: nothing goes in or out any more."""
        return self._lost

    def close(self) -> None:
        """Push what was last written here, and stop."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._exchange()

    def __enter__(self) -> StoreRunState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the exchange

    def exchange(self) -> bool:
        """One turn now: push and pull; False if the store did not answer."""
        return self._exchange()

    def _start(self) -> None:
        if not self._exchange():
            raise FabricError("the store of this run does not answer; look at the host that started it")
        self._thread = threading.Thread(target=self._go, name="run_state", daemon=True)
        self._thread.start()

    def _await_leader(self, deadline_seconds: float) -> None:
        until = time.monotonic() + deadline_seconds
        while not self._store.check([_HEADER_KEY]):
            if time.monotonic() > until:
                raise FabricError(f"the leader did not open the run state within {deadline_seconds:g} s")
            time.sleep(_TURN_SECONDS)
        self._start()

    def _go(self) -> None:
        while not self._over.wait(_TURN_SECONDS) and self._exchange():
            pass

    def _exchange(self) -> bool:
        with self._turn:
            if self._lost:
                return False
            try:
                self._push()
                self._pull()
            except (RuntimeError, OSError):
                self._lost = True  # a connection to a store that broke once never mends
            return not self._lost

    def _push(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= _BEAT_SECONDS:
            self._beat, self._beat_at = self._beat + 1, now
        for rank in self._mine:
            column = np.append(self._rows[MEMBERS_ROWS, rank], self._beat)
            self._show(_column(rank), column)
        if self._leads:
            self._show(_HEADER_KEY, np.concatenate([self._header, *self._rows[list(LAUNCHERS_ROWS)]]))

    def _show(self, key: str, cells: np.ndarray) -> None:
        content = cells.tobytes()
        if self._shown.get(key) != content:
            self._store.set(key, content)  # type: ignore[arg-type]
            self._shown[key] = content

    def _pull(self) -> None:
        wanted = [_column(rank) for rank in self._theirs] + ([] if self._leads else [_HEADER_KEY])
        if not wanted:
            return
        answers = [np.frombuffer(answer, dtype=np.int64) for answer in self._store.multi_get(wanted)]
        if not self._leads:
            header = answers.pop()
            self._header[:] = header[: len(self._header)]
            self._rows[list(LAUNCHERS_ROWS)] = header[len(self._header) :].reshape(-1, self.size)
        now = time.monotonic()
        for rank, column in zip(self._theirs, answers, strict=True):
            self._rows[MEMBERS_ROWS, rank] = column[:-1]
            if int(column[-1]) != self._beats[rank][0]:
                self._beats[rank] = int(column[-1]), now


_COLUMN = len(MEMBERS_ROWS) + 1  # and the beat of this copy
_HEADER_KEY = "run_state/launcher"


def _column(rank: int) -> str:
    return f"run_state/{rank}"
