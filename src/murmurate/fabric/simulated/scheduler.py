"""The scheduler of the simulated fabric: it runs members as coroutines, on a virtual clock, repeatably.

A member runs until it calls the fabric; a seeded generator then picks the member that runs next. So the seed
alone determines the schedule. Time is virtual: each fabric call advances it by ``call_seconds``, and it jumps
to the next alarm when no member can run.

Coroutines are greenlets of one thread, or threads (docs/decisions/0013).
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
from murmurate.fabric.simulated.coroutines import COROUTINES, Coroutine, CoroutineKind


class Crashed(BaseException):
    """Ends a member's coroutine as SIGKILL ends a process: no ``except Exception`` catches it."""


class Stopped(BaseException):
    """Ends the other members' coroutines after one has raised an error, or after a deadlock."""


@dataclass(eq=False)
class Wait:
    """A member's wait until ``ready()``, which may be called any number of times, returns True, or until
    ``deadline_seconds`` after it began.

    ``wake_at`` gives the next virtual time at which ``ready`` may change by itself (when a message arrives),
    infinity if there is none; changes by other members are reported by ``Scheduler.notify`` on one of
    ``topics``. ``describe`` says what is awaited, for the report of a deadlock.
    """

    topics: tuple[Hashable, ...]
    ready: Callable[[], bool]
    describe: Callable[[], str]
    deadline_seconds: float = math.inf
    wake_at: Callable[[], float] = field(default=lambda: math.inf)
    _deadline: float = math.inf
    _alarm: float = math.inf


# With ``own_clocks``, a member lets others run after this many calls without a wait, so that polling makes
# time pass.
_CALLS_BEFORE_YIELD = 100


class Scheduler:
    """Runs ``size`` coroutines, one at a time, and picks the next by ``generator`` among those that can run.

    ``crash_calls`` and ``crash_seconds``: by rank, the fabric call (from 1 up) or the virtual time at which
    the rank dies. ``on_crash`` is called at once, in the coroutine that is running then. ``absent`` ranks
    count as dead until they are revived.

    Every fabric call takes ``call_seconds``. By default this time passes for all members, and any other
    member may run before the call. With ``own_clocks`` it passes for the caller alone, when it next waits (at
    the latest after ``_CALLS_BEFORE_YIELD`` calls): each member has a processor of its own, and all that it
    does between two waits happens at one instant.
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
        coroutines: CoroutineKind = "greenlets",
    ) -> None:
        self.now = 0.0
        self.dead: set[int] = set(absent)
        self._size, self._generator, self._call_seconds = size, generator, call_seconds
        self._crash_calls, self._on_crash, self._own_clocks = dict(crash_calls), on_crash, own_clocks
        self._living = [rank for rank in range(size) if rank not in self.dead]
        self._calls = [0] * size
        self._pending_seconds = [0.0] * size
        self._calls_left = [_CALLS_BEFORE_YIELD] * size
        self._ticket = itertools.count()
        # a heap of (time, ticket, rank, its wait), or of (time, ticket, -1, function) for those of ``at``
        self._alarms: list[tuple[float, int, int, Wait | Callable[[], None]]] = []
        for rank, seconds in crash_seconds.items():
            self.at(seconds, functools.partial(self.kill, rank))
        self._alarm_limit = 1024  # with more alarms, those of finished waits are dropped
        self._waiting: dict[int, Wait] = {}
        # dictionaries without values are ordered sets of ranks
        self._waiters: dict[Hashable, dict[int, None]] = {}  # by topic
        self._runnable: list[int] = []
        self._unfinished: dict[int, None] = {}
        self._failure: BaseException | None = None
        self._results: list[Any] = []
        self._kind: CoroutineKind = coroutines
        self._coroutines: list[Coroutine | None] = [None] * size
        self._chosen: int | None = None  # the rank that the hub is to start (see ``_resume``)
        self._hub: Any = None  # the coroutine that called ``run``

    # -- called by the running member -----------------------------------------------------------

    def turn(self, rank: int) -> None:
        """To be called at the start of every fabric call: counts it, and lets other members run first (with
        ``own_clocks`` only now and then).

        Raises ``Crashed`` or ``Stopped``, as every wait does, and ``FabricError`` where a backward pass would
        have to let other greenlets run.
        """
        self._check(rank)
        self._calls[rank] += 1
        if self._calls[rank] == self._crash_calls.get(rank):
            self.kill(rank)
            self._check(rank)
        if self._own_clocks:
            self._pending_seconds[rank] += self._call_seconds
            self._calls_left[rank] -= 1
            if self._calls_left[rank] <= 0:
                self.sleep(rank, 0.0)
            return
        self.now += self._call_seconds
        self._runnable.append(rank)
        self._switch(rank)

    def add_work(self, rank: int, seconds: float) -> None:
        """Add time that ``rank`` needs for its work; it passes before the rank's next wait begins."""
        self._pending_seconds[rank] += seconds

    def finish_work(self, rank: int) -> None:
        """Let the time pass that ``add_work`` has added for ``rank``."""
        if self._pending_seconds[rank]:
            self.sleep(rank, 0.0)

    def sleep(self, rank: int, seconds: float) -> None:
        """Let others run for ``seconds``, and for the time that ``add_work`` has added for ``rank``."""
        self._calls_left[rank] = _CALLS_BEFORE_YIELD
        end = self.now + seconds
        while self._pending_seconds[rank] or self.now < end:  # more may be added meanwhile, by a pause
            end, self._pending_seconds[rank] = max(end, self.now) + self._pending_seconds[rank], 0.0
            self._wait(rank, self._until(end))

    def _until(self, end: float) -> Wait:
        return Wait((), lambda: self.now >= end, lambda: "the end of its work", wake_at=lambda: end)

    def wait(self, rank: int, wait: Wait) -> bool:
        """Let others run until ``wait.ready()``; False if its deadline passed first."""
        self.finish_work(rank)
        if wait.ready():
            return True
        if wait.deadline_seconds <= 0:
            return False
        return self._wait(rank, wait)

    def _wait(self, rank: int, wait: Wait) -> bool:
        wait._deadline = self.now + wait.deadline_seconds
        self._waiting[rank] = wait
        for topic in wait.topics:
            self._waiters.setdefault(topic, {})[rank] = None
        self._set_alarm(rank, wait)
        self._switch(rank)
        return wait.ready()

    def notify(self, topic: Hashable) -> None:
        """Check again whether the waits on ``topic`` are over."""
        for rank in list(self._waiters.get(topic, ())):
            self._recheck(rank)

    def living(self) -> list[int]:
        """The ranks that have not crashed, ascending. The list must not be changed."""
        return self._living

    # -- the scheduler ----------------------------------------------------------------------------

    def run(self, roles: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run each member's role (its function) to its end, and return the results by rank.

        The result of a member that crashed is its ``Crashed``. Absent members do not run until they are
        revived; if they never are, their result is None. Raises the first other error of a role, or
        ``FabricError`` at a deadlock.
        """
        self._failure, self._results, self._chosen = None, [None] * self._size, None
        self._hub, self._grad_mode = COROUTINES[self._kind](), torch.is_grad_enabled()
        for rank in self._living:
            self._begin(rank, roles[rank])
        while self._unfinished:
            try:
                chosen, self._chosen = self._chosen, None
                self._resume(self._choose() if chosen is None else chosen, self._hub)
            except BaseException as error:  # Ctrl-C in this loop: it ends all coroutines, one after another
                self._failure = self._failure or error
        torch.set_grad_enabled(self._grad_mode)
        if self._failure is not None:
            raise self._failure
        return self._results

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Have the running coroutine call ``act`` at that virtual time, if any member still runs then."""
        heapq.heappush(self._alarms, (seconds, next(self._ticket), -1, act))

    def revive(self, rank: int, role: Callable[[], Any]) -> None:
        """Start ``role`` as a dead rank. Raises ValueError if the rank's coroutine has not ended."""
        if rank not in self.dead or rank in self._unfinished:
            raise ValueError(f"Rank {rank} has not ended: it cannot be revived now.")
        self.dead.discard(rank)
        self._living = sorted([*self._living, rank])
        self._pending_seconds[rank], self._calls_left[rank] = 0.0, _CALLS_BEFORE_YIELD
        self._begin(rank, role)

    def _begin(self, rank: int, role: Callable[[], Any]) -> None:
        act = functools.partial(self._run_role, rank, role)
        self._coroutines[rank] = COROUTINES[self._kind](act, self._hub)
        self._unfinished[rank] = None
        self._runnable.append(rank)

    def _run_role(self, rank: int, role: Callable[[], Any]) -> None:
        torch.set_grad_enabled(self._grad_mode)
        try:
            self._check(rank)
            self._results[rank] = role()
        except (Crashed, Stopped) as end:
            self._results[rank] = end
        except BaseException as error:
            self._failure = self._failure or error
        del self._unfinished[rank]
        self._coroutines[rank] = None

    def _resume(self, rank: int, current: Coroutine) -> None:
        chosen = self._coroutines[rank]
        if chosen is None:
            raise RuntimeError(f"rank {rank} was chosen and has no coroutine")
        if not chosen.has_begun() and current is not self._hub:
            # the hub (the coroutine of ``run``) starts it: coroutines started from here would nest too deeply
            self._chosen, chosen = rank, self._hub
        chosen.switch_from(current)

    def _switch(self, rank: int) -> None:
        """Let the rank that runs next run instead of ``rank``; returns when ``rank`` is chosen again."""
        chosen = self._choose()
        current = self._coroutines[rank]
        if chosen != rank and current is not None:
            if self._kind == "greenlets" and torch._C._current_graph_task_id() != -1:
                raise FabricError(
                    "a collective was called inside a backward pass, where members that share a thread "
                    "cannot take turns: autograd would wait for itself. Make the fabric with "
                    "coroutines='threads'."
                )
            # torch keeps the grad mode for each thread, and all greenlets share one thread
            grad_mode = torch.is_grad_enabled()
            self._resume(chosen, current)
            torch.set_grad_enabled(grad_mode)
        self._check(rank)

    def _check(self, rank: int) -> None:
        if self._failure is not None:
            raise Stopped
        if rank in self.dead:
            raise Crashed(f"rank {rank} crashed at its fabric call {self._calls[rank]}, {self.now:g} s")

    def _choose(self) -> int:
        """The rank that runs next; advances the clock when none can run. After a failure, a rank whose
        coroutine has not ended yet."""
        try:
            while self._failure is None:
                self._fire_alarms(self.now)
                if self._runnable:
                    index = int(self._generator.integers(len(self._runnable)))
                    self._runnable[index], self._runnable[-1] = self._runnable[-1], self._runnable[index]
                    return self._runnable.pop()
                if not self._alarms:
                    raise FabricError(self._deadlock())
                self._fire_alarms(self._alarms[0][0])
        except Exception as error:  # kept for ``run`` to raise, as the running member is not to blame
            self._failure = error
        self._waiting.clear()
        self._waiters.clear()
        return next(iter(self._unfinished))

    def _fire_alarms(self, until: float) -> None:
        """Fire every alarm up to the time ``until``, in order, and advance the clock to ``until``."""
        while self._alarms and self._alarms[0][0] <= until:
            time, _, rank, alarm = heapq.heappop(self._alarms)
            self.now = max(self.now, time)
            if not isinstance(alarm, Wait):
                alarm()
            elif self._waiting.get(rank) is alarm:
                alarm._alarm = math.inf
                self._recheck(rank)
        self.now = max(self.now, until)

    def _recheck(self, rank: int) -> None:
        wait = self._waiting.get(rank)
        if wait is None:
            return
        over = wait.ready() or self.now >= wait._deadline
        if self._waiting.get(rank) is not wait:
            return  # ``ready`` itself has woken the member
        if over:
            self._wake(rank)
        else:
            self._set_alarm(rank, wait)

    def _set_alarm(self, rank: int, wait: Wait) -> None:
        time = min(wait._deadline, wait.wake_at())
        if time < wait._alarm:
            wait._alarm = time
            if len(self._alarms) > self._alarm_limit:
                self._alarms = [a for a in self._alarms if a[2] < 0 or self._waiting.get(a[2]) is a[3]]
                heapq.heapify(self._alarms)
                self._alarm_limit = 2 * len(self._alarms) + 1024
            heapq.heappush(self._alarms, (time, next(self._ticket), rank, wait))

    def _wake(self, rank: int) -> None:
        wait = self._waiting.pop(rank)
        for topic in wait.topics:
            del self._waiters[topic][rank]
            if not self._waiters[topic]:
                del self._waiters[topic]
        self._runnable.append(rank)

    def kill(self, rank: int) -> None:
        """End ``rank`` now, unless it has ended already."""
        if rank in self.dead or rank not in self._unfinished:
            return
        self.dead.add(rank)
        self._living = [other for other in self._living if other != rank]
        self._on_crash(rank)
        if rank in self._waiting:
            self._wake(rank)
        for other in list(self._waiting):
            self._recheck(other)

    def _deadlock(self) -> str:
        stuck = "; ".join(
            f"rank {rank} waits for {wait.describe()}" for rank, wait in sorted(self._waiting.items())
        )
        finished = [rank for rank in self.living() if rank not in self._unfinished]
        clause = f"; finished: {finished}" if finished else ""
        return f"Deadlock: {stuck}{clause}. Make the members' calls match, or give waits a deadline."
