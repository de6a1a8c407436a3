"""A small table of counters that the launcher and all members share: liveness, progress and requests.

Every cell has one writer at a time, so there is no lock that a dead process could hold: a member writes the
``MEMBER_ROWS`` of its own column, the launcher the header, the ``LAUNCHER_ROWS``, and the column of a rank
that has no process. The table can be in any int64 buffer: shared memory, or a plain array.

A restarted rank has another *incarnation*: a number that the launcher raises while no process of that rank
exists. Every change of membership raises the *epoch*.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_STOP, _CHECKPOINT, _EPOCH, _TRANSFER, _SNAPSHOT = range(5)  # cells of the header, which the launcher writes
_HEADER = 8  # cells reserved for the header
# rows of the table, which has one column for each rank
_ALIVE, _ENV_STEPS, _CLOCK, _SAVED, _FINISHED, _INCARNATION = range(6)
_HEARTBEAT, _PACE, _READY, _SENT, _ENTERED, _SKIPPED, _WORK, _HEEDS = range(6, 14)
_ROWS = 14
LAUNCHER_ROWS = (_ALIVE, _INCARNATION)
MEMBER_ROWS = tuple(row for row in range(_ROWS) if row not in LAUNCHER_ROWS)
_BITS = 11  # of each field of a packed ``TransferRequest``
_MASK = (1 << _BITS) - 1
_HEARTBEAT_SECONDS = 1.0


class TransferRequest(NamedTuple):
    """Request ``number``: ``donor`` is to send its state to ``joiner``, whose incarnation is ``incarnation``.

    It is packed into one integer below 2**53, which is read atomically and is exact in a float64; a later
    request is a larger integer.
    """

    number: int
    incarnation: int
    joiner: int
    donor: int

    def packed(self) -> int:
        return ((self.number << _BITS | self.incarnation) << _BITS | self.joiner) << _BITS | self.donor

    @classmethod
    def unpack(cls, code: int) -> TransferRequest:
        rest, donor = code >> _BITS, code & _MASK
        rest, joiner = rest >> _BITS, rest & _MASK
        return cls(rest >> _BITS, rest & _MASK, joiner, donor)


class RunState:
    """Counters of ``size`` members in ``cells``, an int64 array of at least ``cells_needed(size)``."""

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
        """Mark all members as alive, set all else to 0 (called by the launcher before it starts workers)."""
        self._header[:] = 0
        self._rows[:] = 0
        self._rows[_ALIVE] = 1

    def detach(self) -> None:
        """Copy the counts to memory of this process alone, so that the shared memory can be released."""
        self._header, self._rows = self._header.copy(), self._rows.copy()

    # -- written by members, each in its own column

    def advance(self, rank: int, env_steps: int, clock: int) -> None:
        """This replica has made ``env_steps`` and ``clock`` updates so far."""
        self._rows[_ENV_STEPS, rank] = env_steps
        self._rows[_CLOCK, rank] = clock
        self.heartbeat(rank)

    def set_counts(self, counts: Sequence[tuple[int, int]]) -> None:
        """Let env steps and updates of the replicas, by rank, begin where a checkpoint has them: totals must
        not fall back to zero while replicas read their parts, and a run may end before they have."""
        for rank, (env_steps, clock) in enumerate(counts):
            self._rows[_ENV_STEPS, rank], self._rows[_CLOCK, rank] = env_steps, clock

    def heartbeat(self, rank: int, working: bool = True) -> None:
        """Show that this process is neither stopped nor stuck: call it while working and while waiting.

        working: whether it makes progress of its own; False while it waits for others or for a disk.
        """
        self._rows[_HEARTBEAT, rank] += 1
        if working:  # else not written, as another thread of this process may be counting its work
            self._rows[_WORK, rank] += 1

    def set_pace(self, rank: int, seconds: float) -> None:
        """Publish how long this member's rounds take: ``seconds`` is a high quantile."""
        self._rows[_PACE, rank] = int(seconds * 1e6)

    def longest_pace(self) -> float:
        """The longest of the living members' ``pace`` in seconds; 0 before any is known."""
        return max((self.pace(rank) for rank in self.living()), default=0.0)

    def mark_ready(self, rank: int) -> None:
        """This joiner has been built, and waits for a peer's state."""
        self._rows[_READY, rank] = self._rows[_INCARNATION, rank]

    def mark_transferred(self, rank: int, number: int) -> None:
        """This member has written its state for transfer request ``number``."""
        self._rows[_SENT, rank] = number

    def enter(self, rank: int) -> None:
        """This joiner has loaded a peer's state and published it."""
        self._rows[_ENTERED, rank] = self._rows[_INCARNATION, rank]

    def mark_saved(self, rank: int, request: int) -> None:
        """This member has written its part of checkpoint ``request``."""
        self._rows[_SAVED, rank] = request

    def mark_skipped(self, rank: int, request: int) -> None:
        """This member will write no part of checkpoint ``request``, as deltas were in flight too long."""
        self._rows[_SKIPPED, rank] = request

    def mark_finished(self, rank: int) -> None:
        """This replica's last step is done and its last vector published."""
        self._rows[_FINISHED, rank] = 1

    def mark_heeding(self, rank: int) -> None:
        """From now on this replica of a script notes signals, and ends by itself after one."""
        self._rows[_HEEDS, rank] = 1

    # -- written by the launcher

    def mark_dead(self, rank: int) -> None:
        """The process of ``rank`` has ended: members no longer wait for it."""
        self._rows[_ALIVE, rank] = 0
        self._header[_EPOCH] += 1

    def begin_incarnation(self, rank: int) -> int:
        """Called before a dead rank is restarted; returns the number of its new incarnation. Raises
        ValueError for a rank that is alive."""
        if self._rows[_ALIVE, rank]:
            raise ValueError(f"rank {rank} is alive: mark it dead before it begins another incarnation")
        self._rows[_INCARNATION, rank] += 1
        self._rows[[_HEARTBEAT, _PACE, _FINISHED], rank] = 0
        return int(self._rows[_INCARNATION, rank])

    def revive(self, rank: int) -> None:
        """The new process of ``rank`` is ready; members admit it when they notice."""
        self._rows[_ALIVE, rank] = 1
        self._header[_EPOCH] += 1

    def mark_joined(self, rank: int) -> None:
        """``rank`` has entered; where members do not run the same rounds, they notice by the raised epoch."""
        self._header[_EPOCH] += 1

    def request_transfer(self, joiner: int, donor: int) -> TransferRequest:
        number = TransferRequest.unpack(self.transfer_request).number + 1
        request = TransferRequest(number, self.incarnation(joiner), joiner, donor)
        self._header[_TRANSFER] = request.packed()
        return request

    def request_stop(self) -> None:
        self._header[_STOP] = 1

    def request_checkpoint(self, snapshot: bool = False) -> int:
        """Returns the request's number. snapshot: parts are to hold only what an evaluation needs, not the
        state of the source."""
        number = self.checkpoint_requested + 1
        if snapshot:
            self._header[_SNAPSHOT] = number  # written before the request, as members read the request first
        self._header[_CHECKPOINT] = number
        return number

    # -- read by all

    def is_alive(self, rank: int) -> bool:
        return bool(self._rows[_ALIVE, rank])

    def living(self) -> Sequence[int]:
        return [int(i) for i in np.flatnonzero(self._rows[_ALIVE])]

    def incarnation(self, rank: int) -> int:
        return int(self._rows[_INCARNATION, rank])

    def incarnations(self) -> npt.NDArray[np.int64]:
        """A copy of all incarnations, [size]."""
        copied: npt.NDArray[np.int64] = self._rows[_INCARNATION].copy()
        return copied

    def alive_in(self, incarnations: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each rank is alive in its given incarnation, [size]."""
        alive: npt.NDArray[np.bool_] = (self._rows[_ALIVE] == 1) & (self._rows[_INCARNATION] == incarnations)
        return alive

    def is_ready(self, rank: int) -> bool:
        return bool(self._rows[_READY, rank] == self._rows[_INCARNATION, rank])

    def has_entered(self, rank: int) -> bool:
        return bool(self._rows[_ENTERED, rank] == self._rows[_INCARNATION, rank])

    def beats(self, rank: int) -> int:
        return int(self._rows[_HEARTBEAT, rank])

    def work(self) -> npt.NDArray[np.int64]:
        """How many heartbeats each member has sent while it worked, [size]: a copy."""
        copied: npt.NDArray[np.int64] = self._rows[_WORK].copy()
        return copied

    def pace(self, rank: int) -> float:
        """What ``set_pace`` has published, in seconds; 0 before."""
        return float(self._rows[_PACE, rank]) * 1e-6

    @property
    def epoch(self) -> int:
        return int(self._header[_EPOCH])

    @property
    def transfer_request(self) -> int:
        """The newest ``TransferRequest``, packed; 0 before the first."""
        return int(self._header[_TRANSFER])

    def has_transferred(self, rank: int, number: int) -> bool:
        return bool(self._rows[_SENT, rank] == number)

    @property
    def stop_requested(self) -> bool:
        return bool(self._header[_STOP])

    @property
    def checkpoint_requested(self) -> int:
        """The number of the newest checkpoint request; 0 before the first."""
        return int(self._header[_CHECKPOINT])

    def is_snapshot(self, request: int) -> bool:
        """Whether checkpoint ``request`` is a snapshot; False if a later snapshot has replaced it."""
        return bool(self._header[_SNAPSHOT] == request)

    def total_env_steps(self) -> int:
        """The sum over all replicas, dead ones included."""
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

    def skipped_by(self, request: int) -> Sequence[int]:
        """The living members that will write no part of checkpoint ``request``."""
        return [int(i) for i in np.flatnonzero((self._rows[_ALIVE] == 1) & (self._rows[_SKIPPED] == request))]

    def have_all_finished(self, first: int | None = None) -> bool:
        """Whether all living members have finished; with ``first``, those of them whose rank is below it."""
        alive = self._rows[_ALIVE, :first] == 1
        return bool((self._rows[_FINISHED, :first][alive] == 1).all())

    def has_finished(self, rank: int) -> bool:
        return bool(self._rows[_FINISHED, rank])

    def heeds_signals(self, rank: int) -> bool:
        return bool(self._rows[_HEEDS, rank])


@contextlib.contextmanager
def sending_heartbeats(run_state: RunState, rank: int) -> Iterator[None]:
    """Send a heartbeat each second, from a thread, while state is read or written: gigabytes take long, as
    does a slow disk."""
    done = threading.Event()

    def send() -> None:
        while not done.wait(_HEARTBEAT_SECONDS):
            run_state.heartbeat(rank, working=False)

    threading.Thread(target=send, daemon=True).start()
    try:
        yield
    finally:
        done.set()
