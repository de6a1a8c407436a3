"""A script that ends between two steps when a signal asks it to: under strategies with common rounds all
replicas learn of the signal at the same call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, Channel
from murmurate.replicator.replica_parts import ReplicaParts
from murmurate.replicator.resume import ResumableLoop

_EVERY_SECONDS = 0.5  # between two exchanges about signals, if calls are frequent
_MOST_CALLS = 16  # from one exchange to the next: steps may become slower at any time
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows lacks the last


class StopSignals:
    """Notes the signals that ask this process to stop, instead of what they do otherwise, from ``begin`` to
    ``end``.

    number: the first that came; acted_on: the one that the script was told of, perhaps another replica's; 0:
    none. on_begin: called at the first ``begin``. A process that the script forks handles signals as this
    one did before.
    """

    def __init__(self, on_begin: Callable[[], None] = lambda: None) -> None:
        self.number = self.acted_on = 0
        self._on_begin = on_begin
        self._earlier: dict[int, Any] = {}  # handlers
        self._own_process = os.getpid()

    def begin(self) -> bool:
        """Note signals from now on; False outside of the main thread, which alone can have handlers."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._earlier:
            self._on_begin()
        for number in [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]:
            earlier = signal.getsignal(number)
            # the launcher has SIGINT ignored where it passes it on as SIGTERM, and nohup SIGHUP
            if number not in self._earlier and earlier != signal.SIG_IGN:
                self._earlier[number] = earlier
                signal.signal(number, self._note)
        return True

    def end(self) -> None:
        """Restore the earlier handlers."""
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier or signal.SIG_DFL)
        self._earlier.clear()

    def _note(self, number: int, frame: object) -> None:
        if os.getpid() != self._own_process:
            signal.signal(number, self._earlier[number] or signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.number and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C: the user does not want to wait for the script
        else:  # schedulers and torchrun may both send SIGTERM
            self.number = self.number or number


class StoppableLoop(ResumableLoop):
    """A script's replicator that tells the script when to stop. parts: parts of this replica."""

    parts: ReplicaParts
    signals: StopSignals
    _stop_channel: Channel | None = None
    _calls, _rounds = 0, 0  # of ``stopping``; of the strategy, until the last call
    _exchange_call, _exchanged_at = 0, 0.0  # the call of the last exchange about signals; when it was made
    _next_exchange = 1  # the first call with which the next may be made

    def stopping(self) -> bool:
        """Whether the script should save and end: Ctrl-C, SIGTERM or a closed terminal has asked for it.

        Call it between two steps, on all replicas. From its first call on, a signal raises nothing and ends
        nothing, but a second Ctrl-C does. Once True, it stays True.

        Under strategies with common rounds all living replicas get the same answer at the same call, also if
        the signal has reached only some of them. So they must call it equally often, as a collective. For
        this they exchange two numbers about every 0.5 s, and at least every 16 calls (if calls are as rare
        as every 0.5 s, in each), directly after a round of the strategy: that takes about as long as a step
        of all-reduce on a few parameters. So True comes with the first call after a round, from the 16th
        call on at the latest; without a step in between it never comes. Under the other strategies nobody
        waits, and True comes when this replica hears of a signal that has reached any of them.

        Under the launchers "inline" and "xla" it is always False, and signals act as without it. Raises
        Refusal for replicas of several parts, FabricError if a living replica does not call it.
        """
        if self.parts.size > 1:
            raise Refusal("stopping() is for replicas of one part: save every so often instead")
        # a centre that is asked before the first step begins to serve at that step
        if self.rank >= self.size or not self.signals.begin():
            return False
        if not self.signals.acted_on:
            if self.size == 1:
                self.signals.acted_on = self.signals.number
            elif self.strategy.common_rounds:
                self._agree_on_signals()
            else:
                self._hear_of_signals()
        return bool(self.signals.acted_on)

    def _stops(self) -> Channel:
        """The channel among the replicas, made at the first call: scripts without one need none."""
        if self._stop_channel is None:
            numbers = torch.zeros(2, dtype=torch.float64)
            self._stop_channel = self.fabric.channel("stopping", numbers, range(self.size))
        return self._stop_channel

    def _agree_on_signals(self) -> None:
        """All replicas exchange at the same calls: these follow from rounds, and from what all were told."""
        channel = self._stops()
        self._calls += 1
        rounds_before, self._rounds = self._rounds, sum(b.last.round for b in self.bound_replicas.values())
        # directly after a round, in which the replicas have waited for one another
        is_after_round = self._rounds != rounds_before or not self.bound_replicas
        if self._calls < self._next_exchange or not is_after_round:
            return
        now = time.monotonic()
        own = torch.tensor([self.signals.number, now - self._exchanged_at], dtype=torch.float64)
        told = torch.stack(list(channel.gather(own).values()))
        number, longest_seconds = told.max(0).values.tolist()
        seconds_a_call = max(longest_seconds, 1e-6) / (self._calls - self._exchange_call)
        self._exchanged_at, self._exchange_call = now, self._calls
        self._next_exchange = self._calls + min(_MOST_CALLS, max(1, int(_EVERY_SECONDS / seconds_a_call)))
        self.signals.acted_on = int(number)

    def _hear_of_signals(self) -> None:
        channel = self._stops()
        number = self.signals.number
        if Capability.REGISTER in channel.capabilities:
            if number and not channel.version(channel.rank):
                channel.publish(torch.tensor([number, 0.0]).double())
            others = [r for r in range(channel.size) if r != channel.rank and channel.version(r) > 0]
            number = number or max((int(channel.peek(r)[0][0]) for r in others), default=0)
        self.signals.acted_on = number
