"""One baton, many threads, a virtual clock: repeatable asynchrony for the simulated fabric.

A member runs only while it holds the baton, and gives it back only inside a fabric call; a seeded
generator picks who is next. So a schedule is a function of its seed, down to the bit. Time is virtual:
it moves on by ``call_seconds`` a fabric call, and jumps to the next alarm when nobody can run.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from murmurate.fabric.interface import FabricError


class Crashed(BaseException):
    """Ends a member's thread as SIGKILL ends a process: no ``except Exception`` holds it up."""


class Stopped(BaseException):
    """Unwinds the other members after one has raised an error or nobody could go on."""


@dataclass(eq=False)
class Wait:
    """What a member waits for: ``ready`` is free of effects that another call of it could see.

    ``wake_at`` is the next virtual second at which ``ready`` may have changed by itself (a message that
    arrives), infinity if none; changes by others are told with ``Baton.touch(topic)``. ``words`` says
    what is missing, for the report of a deadlock.
    """

    topic: Hashable
    ready: Callable[[], bool]
    words: Callable[[], str]
    deadline_seconds: float = math.inf
    wake_at: Callable[[], float] = field(default=lambda: math.inf)
    _deadline: float = math.inf
    _alarm: float = math.inf


class Baton:
    """Passes one baton between ``size`` threads; picks by ``generator`` among those that can run.

    ``crash_calls`` and ``crash_seconds`` name ranks and when each dies: instead of its k-th fabric call
    (from 1 up), or at a virtual time. ``on_crash`` is told at once, by whichever thread is running.
    """

    def __init__(
        self,
        size: int,
        generator: np.random.Generator,
        call_seconds: float,
        crash_calls: Mapping[int, int],
        crash_seconds: Mapping[int, float],
        on_crash: Callable[[int], None],
    ) -> None:
        self.now = 0.0
        self.dead: set[int] = set()
        self._size, self._generator, self._call_seconds = size, generator, call_seconds
        self._crash_calls, self._on_crash = dict(crash_calls), on_crash
        self._calls = [0] * size
        self._ticket = itertools.count()
        self._alarms: list[tuple[float, int, int, Wait | None]] = []  # None: a crash
        for rank, seconds in crash_seconds.items():
            heapq.heappush(self._alarms, (seconds, next(self._ticket), rank, None))
        self._crowded = 1024
        self._waiting: dict[int, Wait] = {}
        self._about: dict[Hashable, dict[int, None]] = {}
        self._runnable: list[int] = []
        self._unfinished: list[int] = []
        self._failure: BaseException | None = None
        self._results: list[Any] = []
        self._turns = [threading.Lock() for _ in range(size)]
        self._over = threading.Lock()
        for lock in [*self._turns, self._over]:
            lock.acquire()

    # -- what a running member calls ------------------------------------------------------------

    def turn(self, rank: int) -> None:
        """The start of every fabric call: others may run first. Raises ``Crashed`` or ``Stopped``."""
        self._check(rank)
        self._calls[rank] += 1
        if self._calls[rank] == self._crash_calls.get(rank):
            self._kill(rank)
            self._check(rank)
        self.now += self._call_seconds
        self._runnable.append(rank)
        self._hand_over(rank)

    def wait(self, rank: int, wait: Wait) -> bool:
        """Give the baton away until ``wait.ready()``; False if its deadline passed first."""
        if wait.ready():
            return True
        if wait.deadline_seconds <= 0:
            return False
        wait._deadline = self.now + wait.deadline_seconds
        self._waiting[rank] = wait
        self._about.setdefault(wait.topic, {})[rank] = None
        self._set_alarm(rank, wait)
        self._hand_over(rank)
        return wait.ready()

    def touch(self, topic: Hashable) -> None:
        """Look again whether those who wait about ``topic`` can run."""
        for rank in list(self._about.get(topic, ())):
            self._look_again(rank)

    def living(self) -> list[int]:
        """The ranks that have not crashed, ascending."""
        return [rank for rank in range(self._size) if rank not in self.dead]

    # -- the scheduler ----------------------------------------------------------------------------

    def run(self, roles: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one role a member to its end; a crashed member's result is its ``Crashed``.

        Raises the first other error of a role, or the ``FabricError`` of a deadlock.
        """
        self._failure, self._results = None, [None] * self._size
        self._unfinished, self._runnable = list(range(self._size)), list(range(self._size))
        threads = [
            threading.Thread(target=self._live, args=(rank, role), name=f"replica-{rank}", daemon=True)
            for rank, role in enumerate(roles)
        ]
        for thread in threads:
            thread.start()
        try:
            self._turns[self._choose()].release()
            self._over.acquire()
        except BaseException as error:  # Ctrl-C: whoever holds the baton stops at its next call
            self._failure = self._failure or error
            raise
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._results

    def _live(self, rank: int, role: Callable[[], Any]) -> None:
        self._turns[rank].acquire()
        try:
            self._check(rank)
            self._results[rank] = role()
        except (Crashed, Stopped) as end:
            self._results[rank] = end
        except BaseException as error:
            self._failure = self._failure or error
        self._unfinished.remove(rank)
        (self._turns[self._choose()] if self._unfinished else self._over).release()

    def _hand_over(self, rank: int) -> None:
        chosen = self._choose()
        if chosen != rank:
            self._turns[chosen].release()
            self._turns[rank].acquire()
        self._check(rank)

    def _check(self, rank: int) -> None:
        if self._failure is not None:
            raise Stopped
        if rank in self.dead:
            raise Crashed(f"rank {rank} crashed at its fabric call {self._calls[rank]}, {self.now:g} s")

    def _choose(self) -> int:
        """Who runs next; moves the clock on when nobody could. Once stopped, each in turn unwinds."""
        try:
            while self._failure is None:
                self._ring(self.now)
                if self._runnable:
                    place = int(self._generator.integers(len(self._runnable)))
                    self._runnable[place], self._runnable[-1] = self._runnable[-1], self._runnable[place]
                    return self._runnable.pop()
                if not self._alarms:
                    raise FabricError(self._deadlock())
                self._ring(self._alarms[0][0])
        except Exception as error:  # kept for ``run`` to raise: here it would end an innocent thread
            self._failure = error
        self._waiting.clear()
        self._about.clear()
        return self._unfinished[0]

    def _ring(self, until: float) -> None:
        """Let every alarm up to ``until`` ring, in order, and leave the clock there."""
        while self._alarms and self._alarms[0][0] <= until:
            time, _, rank, wait = heapq.heappop(self._alarms)
            self.now = max(self.now, time)
            if wait is None:
                self._kill(rank)
            elif self._waiting.get(rank) is wait:
                wait._alarm = math.inf
                self._look_again(rank)
        self.now = max(self.now, until)

    def _look_again(self, rank: int) -> None:
        wait = self._waiting[rank]
        if wait.ready() or self.now >= wait._deadline:
            self._wake(rank)
        else:
            self._set_alarm(rank, wait)

    def _set_alarm(self, rank: int, wait: Wait) -> None:
        time = min(wait._deadline, wait.wake_at())
        if time < wait._alarm:
            wait._alarm = time
            if len(self._alarms) > self._crowded:  # alarms of waits long over, with far deadlines
                self._alarms = [a for a in self._alarms if a[3] is None or self._waiting.get(a[2]) is a[3]]
                heapq.heapify(self._alarms)
                self._crowded = 2 * len(self._alarms) + 1024
            heapq.heappush(self._alarms, (time, next(self._ticket), rank, wait))

    def _wake(self, rank: int) -> None:
        wait = self._waiting.pop(rank)
        del self._about[wait.topic][rank]
        if not self._about[wait.topic]:
            del self._about[wait.topic]
        self._runnable.append(rank)

    def _kill(self, rank: int) -> None:
        if rank in self.dead or rank not in self._unfinished:
            return
        self.dead.add(rank)
        self._on_crash(rank)
        if rank in self._waiting:
            self._wake(rank)
        for other in list(self._waiting):
            self._look_again(other)

    def _deadlock(self) -> str:
        stuck = "; ".join(
            f"rank {rank} waits for {wait.words()}" for rank, wait in sorted(self._waiting.items())
        )
        ended = [rank for rank in self.living() if rank not in self._unfinished]
        rest = f"; finished: {ended}" if ended else ""
        return f"Nobody can go on: {stuck}{rest}. Make the members' calls match, or give waits a deadline."
