"""One member's state of the rounds of one channel: a round is one collective call by all members."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from murmurate.buffers import Bytes, as_tensor
from murmurate.fabric.network.frames import FrameRejected


@dataclass(frozen=True)
class RoundResult:
    """The result of one round.

    members: the members that took part. data: a buffer with one vector [N], or with one for each member,
    still to be divided by ``divisor``; None if no member sent a vector. versions: by rank, the newest version
    in the member's register before the round.
    """

    round: int
    call: str
    members: list[int]
    data: Any
    versions: dict[int, int]
    divisor: int = 1

    def divided(self, dtype: torch.dtype) -> RoundResult:
        """The result with its data divided, as it is sent to others. This one does not change, as the thread
        that made the call may be reading it."""
        if self.divisor == 1:
            return self
        mean = torch.div(as_tensor(self.data, dtype), self.divisor)
        return dataclasses.replace(self, data=mean.view(torch.uint8).numpy(), divisor=1)


@dataclass
class RoundInput:
    """A member's contribution to a round that the leader executes. version: newest one of its register."""

    call: str
    x: Bytes | None
    version: int


@dataclass
class RoundState:
    """One member's state of the rounds of one channel.

    last: the last result. failed: by round, the message with which it failed. repeat_asked: the newest round
    that this member asked the others to repeat, as it had no result from an engine. repeat: by rank, the
    newest round that another member asked to repeat. not_reached: by rank, the round that another member had
    not reached when it was asked to repeat it. contributions: if this member leads, by round and rank.
    """

    members: set[int]
    round: int = 0
    call: str = ""
    leader: int | None = None
    last: RoundResult | None = None
    contributions: dict[int, dict[int, RoundInput]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    repeat_asked: int = 0
    repeat: dict[int, int] = field(default_factory=dict)
    not_reached: dict[int, int] = field(default_factory=dict)


def member_ranks(value: Any, size: int) -> list[int]:
    """The members that a result claims to have. Raises FrameRejected for what is no list of ranks."""
    if not isinstance(value, list) or not all(isinstance(r, int) and 0 <= r < size for r in value):
        raise FrameRejected("meta", "a result without a list of its members")
    return value
