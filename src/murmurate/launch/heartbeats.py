"""Heartbeats: which members of a run are silent, and which of them are to be excluded (docs/decisions/0010).

A member sends heartbeats while it works and while it waits for others, so only one that is stopped, or stuck
in an environment or in native code, sends none. Such a member is *silent*, which is reported. At a deadline
it is to be *excluded*, because it holds up synchronous rounds, checkpoints and the run's end.

If others wait for the member, or the operating system says that its process is stopped, the deadline depends
on how long rounds have taken. Otherwise the member may just be slow (in an asynchronous run, before the
first rounds, while a checkpoint is written or a replica joins), and it is ``Run.hang_after_seconds``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from murmurate.fabric.awake import AwakeClock
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.launch.host_memory import Process, this_host
from murmurate.launch.role import log_name
from murmurate.training.coordinator import Coordinator
from murmurate.training.run import Run

FLOOR_SECONDS = 5.0  # the shortest deadline
STOPPED_SECONDS = 10.0  # deadline of a stopped process before the duration of its rounds is known
# shortest deadline, once rounds are timed, of a member without which the run ends: a centre, the last replica
ENDS_RUN_SECONDS = 20.0
ROUNDS = 20.0  # the deadline is the time of this many rounds


def patience(pace_seconds: float, cap_seconds: float) -> float:
    """How long a member may send no heartbeat when rounds take ``pace_seconds`` (a high quantile)."""
    return min(max(ROUNDS * pace_seconds, FLOOR_SECONDS), cap_seconds)


class Monitored(Protocol):
    """A member's process, as its heartbeats are monitored."""

    @property
    def rank(self) -> int: ...
    @property
    def is_stopped(self) -> bool: ...
    def dump_stacks(self) -> bool:
        """Have the stacks of its threads written to its log; returns whether that can be done."""
        ...


@dataclass(frozen=True)
class EngineMember:
    """A member whose process another engine (torchrun, Ray) started. Whether the process is stopped can be
    seen only on this host."""

    rank: int
    process: Process

    @property
    def is_stopped(self) -> bool:
        return self.process.host == this_host() and is_stopped(self.process.pid)

    def dump_stacks(self) -> bool:
        return False  # this process must not send signals to another engine's processes


Member = TypeVar("Member", bound=Monitored)


@dataclass
class _MemberState:
    """The heartbeats of one member."""

    silent_since: float  # when the last one was seen, or its absence was last excused
    beats: int = 0  # number of heartbeats so far
    silent: bool = False  # whether silence was reported since
    in_log: bool = False  # whether the stacks of its threads were then written to its log
    excluded: bool = False  # whether exclusion was reported, which is done once: the process may end later


class HeartbeatMonitor:
    """The heartbeats of one run's members (under ray and torchrun, until the members change): ``poll`` it a
    few times a second.

    replaceable: whether an excluded replica can be replaced while the others go on.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Callable[[], float] = time.monotonic,
        *,
        replaceable: bool = True,
    ) -> None:
        self.coordinator, self.run_state = coordinator, coordinator.run_state
        self.run = coordinator.run
        self._replaceable = replaceable
        self._clock = AwakeClock(clock)
        self._members = [_MemberState(self._clock.now()) for _ in range(self.run.members)]

    def poll(self, members: Iterable[Member]) -> Sequence[Member]:
        """Check ``members``, which are all that have not ended; returns those to be excluded."""
        now = self._clock.now()
        return [member for member in members if self._check(member, now)]

    def is_silent(self, rank: int) -> bool:
        return self._members[rank].silent

    def forget(self, rank: int) -> None:
        """The process of ``rank`` has ended; another one may begin."""
        self._members[rank] = _MemberState(self._clock.now())

    def _check(self, member: Monitored, now: float) -> bool:
        """Report if a member is silent, or answers again; returns whether it is to be excluded now."""
        rank, name = member.rank, self.coordinator.name(member.rank)
        state, beats = self._members[rank], self.run_state.beats(rank)
        # a member that is still being built sends no heartbeats, and opening a data set may take long
        if beats != state.beats or (beats == 0 and not member.is_stopped):
            if state.silent:
                message = f"{name} answers again after {now - state.silent_since:.1f} s"
                self.coordinator.event("woke", message, member=rank)
            state.beats, state.silent_since, state.silent = beats, now, False
            return False
        silent_seconds = now - state.silent_since
        if silent_seconds < FLOOR_SECONDS / 2 or state.excluded:
            return False
        is_stopped = member.is_stopped
        usual, allowed = self._deadlines(rank, is_stopped)
        if silent_seconds > usual / 2 and not state.silent:
            state.silent = True
            state.in_log = bool(beats) and not is_stopped and member.dump_stacks()
            consequence = "the others wait for it" if self._blocks_others() else "the others go on"
            if self.run.members == 1:
                consequence = "the run waits for it"
            message = f"{name} has sent no heartbeat for {silent_seconds:.1f} s; {consequence}"
            self.coordinator.event("silent", message, member=rank)
        if silent_seconds <= allowed:
            return False
        state.excluded = True
        if is_stopped:
            cause = "its process is stopped"
        else:
            where = f"see where in {log_name(rank)}" if state.in_log else "in an environment or native code"
            cause = f"it is stuck: {where}"
        message = f"{name} was silent for {silent_seconds:.1f} s ({cause}) and is excluded"
        if not is_stopped:
            longer = math.ceil(max(self.run.hang_after_seconds, Run.hang_after_seconds) + silent_seconds)
            message += f". If its environment may take so long, use --hang-after-seconds {longer}"
        self.coordinator.event("excluded", message, member=rank, deadline_seconds=allowed)
        return True

    def _deadlines(self, rank: int, is_stopped: bool) -> tuple[float, float]:
        """(the deadline by the duration of rounds, at half of which silence is reported; the deadline of
        exclusion), in seconds."""
        cap = self.run.hang_after_seconds
        if self.run_state.pace(rank) == 0:
            allowed = min(STOPPED_SECONDS, cap) if is_stopped else cap
            return allowed, allowed
        usual = patience(self.run_state.longest_pace(), cap)
        # the time that it takes to write a checkpoint, or to send a joiner the state, is unrelated to rounds
        is_busy = self.coordinator.is_saving or self.coordinator.is_admitting
        if not is_stopped and (is_busy or not self._blocks_others()):
            return usual, cap
        allowed = max(usual, ENDS_RUN_SECONDS) if self._ends_run(rank) else usual
        # a reset that is slow and rare is not in the quantile of rounds: who expects one raises the cap
        return usual, min(allowed + self.run.more_seconds(), cap)

    def _blocks_others(self) -> bool:
        return self.run.strategy.synchronous and self.run.members > 1

    def _ends_run(self, rank: int) -> bool:
        """Whether the run would end if this member ended."""
        if rank >= self.run.replicas or not self._replaceable:
            return True
        others = [other for other in self.run_state.living() if other < self.run.replicas and other != rank]
        return all(self.is_silent(other) for other in others)
