"""One scheduler, many contexts, a virtual clock: repeatable asynchrony for the simulated fabric.

A member runs only while it holds the scheduler, and gives it back only inside a fabric call; a seeded
generator picks who is next. So a schedule is a function of its seed, down to the bit. Time is virtual:
it moves on by ``call_seconds`` a fabric call, and jumps to the next alarm when nobody can run.

Contexts are greenlets of one thread, or threads (docs/decisions/0013).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.coroutines import Context, Kind, context, hub


class Crashed(BaseException):
    """Ends a member's context as SIGKILL ends a process: no ``except Exception`` holds it up."""


class Stopped(BaseException):
    """Unwinds the other members after one has raised an error or nobody could go on."""


@dataclass(eq=False)
class Wait:
    """What a member waits for: ``ready`` is free of effects that another call of it could see.

    ``wake_at`` is the next virtual second at which ``ready`` may have changed by itself (a message that
    arrives), infinity if none; changes by others are told with ``Scheduler.touch`` on one of ``topics``.
    ``words`` says what is missing, for the report of a deadlock.
    """

    topics: tuple[Hashable, ...]
    ready: Callable[[], bool]
    words: Callable[[], str]
    deadline_seconds: float = math.inf
    wake_at: Callable[[], float] = field(default=lambda: math.inf)
    _deadline: float = math.inf
    _alarm: float = math.inf


# With clocks of their own, members give the scheduler up after so many calls, so that polling gets nowhere.
_PATIENT_CALLS = 100


class Scheduler:
    """Passes one scheduler between ``size`` contexts; picks by ``generator`` among those that can run.

    ``crash_calls`` and ``crash_seconds`` name ranks and when each dies: instead of its k-th fabric call
    (from 1 up), or at a virtual time. ``on_crash`` is told at once, by whichever context is running.
    ``absent`` ranks count as dead until they are revived.

    Every fabric call costs ``call_seconds``: of everybody's time, and any other member may run before it;
    or, with ``own_clocks``, of the caller's own time, owed until it next waits. Then members are processors
    of their own, and what one does between two waits happens at one instant.
    """

    def __init__(
        self,
        size: int,
        generator: np.random.Generator,
        call_seconds: float,
        crash_calls: Mapping[int, int],
        crash_seconds: Mapping[int, float],
        on_crash: Callable[[int], None],
        absent: Collection[int] = (),
        own_clocks: bool = False,
        contexts: Kind = "greenlets",
    ) -> None:
        self.now = 0.0
        self.dead: set[int] = set(absent)
        self._size, self._generator, self._call_seconds = size, generator, call_seconds
        self._crash_calls, self._on_crash, self._own_clocks = dict(crash_calls), on_crash, own_clocks
        self._living = [rank for rank in range(size) if rank not in self.dead]
        self._calls = [0] * size
        self._owed = [0.0] * size
        self._patience = [_PATIENT_CALLS] * size
        self._ticket = itertools.count()
        self._alarms: list[tuple[float, int, int, Wait | Callable[[], None]]] = []
        for rank, seconds in crash_seconds.items():
            self.at(seconds, functools.partial(self.kill, rank))
        self._crowded = 1024
        self._waiting: dict[int, Wait] = {}
        self._about: dict[Hashable, dict[int, None]] = {}
        self._runnable: list[int] = []
        self._unfinished: dict[int, None] = {}
        self._failure: BaseException | None = None
        self._results: list[Any] = []
        self._kind: Kind = contexts
        self._contexts: list[Context | None] = [None] * size
        self._chosen: int | None = None
        self._hub: Any = None

    # -- what a running member calls ------------------------------------------------------------

    def turn(self, rank: int) -> None:
        """The start of every fabric call: others may run first. Raises ``Crashed`` or ``Stopped``."""
        self._check(rank)
        self._calls[rank] += 1
        if self._calls[rank] == self._crash_calls.get(rank):
            self.kill(rank)
            self._check(rank)
        if self._own_clocks:
            self._owed[rank] += self._call_seconds
            self._patience[rank] -= 1
            if self._patience[rank] <= 0:
                self.sleep(rank, 0.0)
            return
        self.now += self._call_seconds
        self._runnable.append(rank)
        self._hand_over(rank)

    def owe(self, rank: int, seconds: float) -> None:
        """Work that ``rank`` has to do, and will have done before its next wait begins."""
        self._owed[rank] += seconds

    def pay(self, rank: int) -> None:
        """Let the time pass that ``rank`` owes."""
        if self._owed[rank]:
            self.sleep(rank, 0.0)

    def sleep(self, rank: int, seconds: float) -> None:
        """Let others run for ``seconds`` and whatever ``rank`` owes."""
        self._patience[rank] = _PATIENT_CALLS
        end = self.now + seconds
        while self._owed[rank] or self.now < end:  # more may come to be owed meanwhile: a pause
            end, self._owed[rank] = max(end, self.now) + self._owed[rank], 0.0
            self._wait(rank, self._until(end))

    def _until(self, end: float) -> Wait:
        return Wait((), lambda: self.now >= end, lambda: "its work", wake_at=lambda: end)

    def wait(self, rank: int, wait: Wait) -> bool:
        """Give the scheduler away until ``wait.ready()``; False if its deadline passed first."""
        self.pay(rank)
        if wait.ready():
            return True
        if wait.deadline_seconds <= 0:
            return False
        return self._wait(rank, wait)

    def _wait(self, rank: int, wait: Wait) -> bool:
        wait._deadline = self.now + wait.deadline_seconds
        self._waiting[rank] = wait
        for topic in wait.topics:
            self._about.setdefault(topic, {})[rank] = None
        self._set_alarm(rank, wait)
        self._hand_over(rank)
        return wait.ready()

    def touch(self, topic: Hashable) -> None:
        """Look again whether those who wait about ``topic`` can run."""
        for rank in list(self._about.get(topic, ())):
            self._look_again(rank)

    def living(self) -> list[int]:
        """The ranks that have not crashed, ascending. One list until that changes: not to be written to."""
        return self._living

    # -- the scheduler ----------------------------------------------------------------------------

    def run(self, roles: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one role a member to its end; a crashed member's result is its ``Crashed``.

        Those absent get none, and have None as result, until they are revived. Raises the first other error
        of a role, or the ``FabricError`` of a deadlock.
        """
        self._failure, self._results, self._chosen = None, [None] * self._size, None
        self._hub, self._grad_mode = hub(self._kind), torch.is_grad_enabled()
        for rank in self._living:
            self._begin(rank, roles[rank])
        while self._unfinished:
            try:
                chosen, self._chosen = self._chosen, None
                self._enter(self._choose() if chosen is None else chosen, self._hub)
            except BaseException as error:  # Ctrl-C in here: all unwind, each in turn
                self._failure = self._failure or error
        torch.set_grad_enabled(self._grad_mode)
        if self._failure is not None:
            raise self._failure
        return self._results

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Have whichever context is running then call ``act`` at that virtual time, if anybody still runs."""
        heapq.heappush(self._alarms, (seconds, next(self._ticket), -1, act))

    def revive(self, rank: int, role: Callable[[], Any]) -> None:
        """Let a dead rank's ``role`` start now. Raises ValueError for one that lives or still unwinds."""
        if rank not in self.dead or rank in self._unfinished:
            raise ValueError(f"Rank {rank} is not dead and gone: it cannot come back now.")
        self.dead.discard(rank)
        self._living = sorted([*self._living, rank])
        self._owed[rank], self._patience[rank] = 0.0, _PATIENT_CALLS
        self._begin(rank, role)

    def _begin(self, rank: int, role: Callable[[], Any]) -> None:
        self._contexts[rank] = context(self._kind, functools.partial(self._live, rank, role), self._hub)
        self._unfinished[rank] = None
        self._runnable.append(rank)

    def _live(self, rank: int, role: Callable[[], Any]) -> None:
        torch.set_grad_enabled(self._grad_mode)
        try:
            self._check(rank)
            self._results[rank] = role()
        except (Crashed, Stopped) as end:
            self._results[rank] = end
        except BaseException as error:
            self._failure = self._failure or error
        del self._unfinished[rank]
        self._contexts[rank] = None

    def _enter(self, rank: int, giver: Context) -> None:
        chosen = self._contexts[rank]
        if chosen is None:
            raise RuntimeError(f"rank {rank} was chosen and has no context")
        if not chosen.has_begun() and giver is not self._hub:
            # begun from in here it would stand on our stack, and the next on its
            self._chosen, chosen = rank, self._hub
        chosen.take_over(giver)

    def _hand_over(self, rank: int) -> None:
        chosen = self._choose()
        own = self._contexts[rank]
        if chosen != rank and own is not None:
            if self._kind == "greenlets" and torch._C._current_graph_task_id() != -1:
                raise FabricError(
                    "a collective was called inside a backward pass, where members that share a thread "
                    "cannot take turns: its engine would wait for itself. Make the fabric with "
                    "contexts='threads'."
                )
            # torch keeps this a thread, and all contexts are of one
            grad_mode = torch.is_grad_enabled()
            self._enter(chosen, own)
            torch.set_grad_enabled(grad_mode)
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
        return next(iter(self._unfinished))

    def _ring(self, until: float) -> None:
        """Let every alarm up to ``until`` ring, in order, and leave the clock there."""
        while self._alarms and self._alarms[0][0] <= until:
            time, _, rank, what = heapq.heappop(self._alarms)
            self.now = max(self.now, time)
            if not isinstance(what, Wait):
                what()
            elif self._waiting.get(rank) is what:
                what._alarm = math.inf
                self._look_again(rank)
        self.now = max(self.now, until)

    def _look_again(self, rank: int) -> None:
        wait = self._waiting.get(rank)
        if wait is None:
            return
        over = wait.ready() or self.now >= wait._deadline
        if self._waiting.get(rank) is not wait:
            return  # to look was enough to wake all of them
        if over:
            self._wake(rank)
        else:
            self._set_alarm(rank, wait)

    def _set_alarm(self, rank: int, wait: Wait) -> None:
        time = min(wait._deadline, wait.wake_at())
        if time < wait._alarm:
            wait._alarm = time
            if len(self._alarms) > self._crowded:  # alarms of waits long over, with far deadlines
                self._alarms = [a for a in self._alarms if a[2] < 0 or self._waiting.get(a[2]) is a[3]]
                heapq.heapify(self._alarms)
                self._crowded = 2 * len(self._alarms) + 1024
            heapq.heappush(self._alarms, (time, next(self._ticket), rank, wait))

    def _wake(self, rank: int) -> None:
        wait = self._waiting.pop(rank)
        for topic in wait.topics:
            del self._about[topic][rank]
            if not self._about[topic]:
                del self._about[topic]
        self._runnable.append(rank)

    def kill(self, rank: int) -> None:
        """End ``rank`` where it is, unless it has ended."""
        if rank in self.dead or rank not in self._unfinished:
            return
        self.dead.add(rank)
        self._living = [other for other in self._living if other != rank]
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
