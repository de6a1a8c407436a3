"""Who is silent, who is out, who comes in: decided in one place, by the launcher (docs/decisions/0010).

A member gives signs of life while it works and while it waits for others, so only one that is stopped, or
stuck in native code, gives none. It is *silent* then, which is told; the others go on under an asynchronous
strategy, and it goes on too when it wakes. In a synchronous round it holds up all others, and is *excluded*
at a deadline that follows the times that rounds have taken: its process is ended, so that nothing of it can
reach a later round, and started again to come in with a living peer's state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from murmurate.fabric.processes.run_state import HandOver
from murmurate.launch.worker_processes import Crew, Role
from murmurate.training.coordinator import Coordinator

FLOOR_SECONDS = 5.0
CAP_SECONDS = 45.0  # below the fabric's own deadline, which ends the run
ROUNDS = 20.0
REJOINS = 3
_ASLEEP_SECONDS = 1.0


def patience(pace_seconds: float) -> float:
    """How long a member may give no sign of life when rounds take ``pace_seconds`` (a high quantile).

    0 is a pace not known yet, and has all the time there is.
    """
    return min(max(ROUNDS * pace_seconds, FLOOR_SECONDS), CAP_SECONDS) if pace_seconds > 0 else CAP_SECONDS


@dataclass
class Watch:
    """What was last heard of one member."""

    beats: int = 0
    since: float = 0.0
    silent: bool = False


class Arbiter:
    """Listens to the members of one run, and keeps its membership. ``poll`` it a few times a second."""

    def __init__(
        self, crew: Crew, coordinator: Coordinator, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.crew, self.coordinator, self.run_state = crew, coordinator, coordinator.run_state
        self.run = coordinator.run
        self._watches = [Watch() for _ in range(self.run.members)]
        self._clock = clock
        self._polled_at = clock()
        self._restarts: Counter[int] = Counter()
        self._rejoins: Counter[int] = Counter()
        self._asked: HandOver | None = None
        self._deaths = 0
        self._deaths_when_asked = 0

    def poll(self) -> None:
        now = self._clock()
        if now - self._polled_at > _ASLEEP_SECONDS:
            # nobody listened, as when all of us were stopped by Ctrl-Z: nothing can be held against them
            for watch in self._watches:
                watch.since = now
        self._polled_at = now
        for role in self.crew.roles:
            if not role.ended and not self.run_state.has_finished(role.rank):
                self._listen(role, self._watches[role.rank], now)
        if self._is_over():
            self._send_joiners_away()
        else:
            self._let_in()

    # -- signs of life ------------------------------------------------------------------------------

    def _listen(self, role: Role, watch: Watch, now: float) -> None:
        beats = self.run_state.beats(role.rank)
        who = self.coordinator.name(role.rank)
        if beats != watch.beats or beats == 0:  # a member that is still being built has no beat
            if watch.silent:
                silent_seconds = now - watch.since
                message = f"{who} answers again after {silent_seconds:.1f} s"
                self.coordinator.event("woke", message, member=role.rank)
            watch.beats, watch.since, watch.silent = beats, now, False
            return
        silent_seconds = now - watch.since
        if silent_seconds > self._allowed(role.rank) / 2 and not watch.silent:
            watch.silent = True
            goes_on = "the others wait for it" if self._holds_up() else "the others go on"
            message = f"{who} gives no sign of life since {silent_seconds:.1f} s; {goes_on}"
            self.coordinator.event("silent", message, member=role.rank)
        allowed = self._allowed(role.rank, saving=self.coordinator.is_saving or self.coordinator.is_admitting)
        if silent_seconds > allowed and self._holds_up() and not role.ended_by_us:
            message = f"{who} was silent for {silent_seconds:.1f} s in a synchronous round and is excluded"
            self.coordinator.event("excluded", message, member=role.rank, deadline_seconds=allowed)
            role.end("excluded")

    def _allowed(self, rank: int, saving: bool = False) -> float:
        if self.run_state.pace(rank) == 0:
            return CAP_SECONDS
        seconds = patience(max(self.run_state.pace(other) for other in self.run_state.living()))
        if saving:  # a slow disk is no silence
            slowest = self.coordinator.slowest_save_seconds
            seconds = CAP_SECONDS if slowest is None else min(seconds + 4 * slowest, CAP_SECONDS)
        return seconds

    def _holds_up(self) -> bool:
        return self.run.strategy.synchronous and self.run.members > 1

    # -- deaths and joining -------------------------------------------------------------------------

    def died(self, role: Role) -> None:
        """``role`` has ended, and is buried. Start it again if it may come back."""
        self._deaths += 1
        rank = role.rank
        self._watches[rank] = Watch(since=self._clock())
        if self._asked is not None and self._asked.joiner == rank:
            self._forget()
        if self._is_over() or not self._donors():
            return
        if role.ended_by_us == "excluded" and self._rejoins[rank] < REJOINS:
            self._rejoins[rank] += 1
        elif self._restarts[rank] < self.run.restarts:
            self._restarts[rank] += 1
        elif role.ended_by_us != "retried":
            return
        life = self.run_state.begin_incarnation(rank)
        message = f"replica {rank} is started again, and takes a living peer's state"
        self.coordinator.event("restarted", message, member=rank, life=life)
        self.crew.start_again(rank)

    def _is_over(self) -> bool:
        others = [r for r in self.crew.roles if r.rank < self.run.replicas and not self._is_at_the_door(r)]
        return self.coordinator.is_due or all(r.ended or self.run_state.has_finished(r.rank) for r in others)

    def _is_at_the_door(self, role: Role) -> bool:
        return role.joins and not role.ended and not self.run_state.has_entered(role.rank)

    def _donors(self) -> list[int]:
        return [
            role.rank
            for role in self.crew.roles
            if role.rank < self.run.replicas
            and not role.ended
            and not self._is_at_the_door(role)
            and not self.run_state.has_finished(role.rank)
            and not self._watches[role.rank].silent
        ]

    def _send_joiners_away(self) -> None:
        for role in self.crew.roles:
            if self._is_at_the_door(role) and not role.ended_by_us:
                role.end("the run was over")

    def _let_in(self) -> None:
        """One at a time: ask a living peer for its state, and see that it arrives."""
        if self._asked is not None:
            self._follow(self._asked)
            return
        waiting = [
            r.rank for r in self.crew.roles if self._is_at_the_door(r) and self.run_state.is_ready(r.rank)
        ]
        donors = self._donors()
        if waiting and donors and not self.coordinator.is_saving:
            # alive from here on: members with common rounds may count with it as soon as they agree
            self.run_state.revive(waiting[0])
            self._ask(waiting[0], donors[0])

    def _ask(self, joiner: int, donor: int) -> None:
        self.coordinator.is_admitting = True
        self._deaths_when_asked = self._deaths
        self._asked = self.run_state.ask_hand_over(joiner, donor)

    def _follow(self, asked: HandOver) -> None:
        if self.run_state.has_entered(asked.joiner):
            self.coordinator.joined(asked.joiner, asked.donor)
            self._forget()
            return
        joiner = self.crew.roles[asked.joiner]
        if self._watches[asked.joiner].silent and not joiner.ended_by_us:
            joiner.end("retried")  # as long as it is at the door, nothing is saved
        if self.run_state.has_given(asked.donor, asked.number):
            return
        if self.run.strategy.synchronous:
            # the others may have let the joiner in already and wait for it, which waits for the dead
            if self._deaths != self._deaths_when_asked and not joiner.ended_by_us:
                joiner.end("retried")
        elif asked.donor not in (donors := self._donors()) and donors:
            self._ask(asked.joiner, donors[0])

    def _forget(self) -> None:
        self._asked = None
        self.coordinator.is_admitting = False
