"""A member's state of the rounds of one channel's collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from murmurate.buffers import Bytes, as_tensor
from murmurate.fabric.network.frames import FrameRejected


@dataclass
class Result:
    """The result of one round.

    members: those that took part. data: a buffer of one vector [N], or of one for each member, still to be
    divided by ``divisor``; None if no vector came. versions: of each member's register before the round.
    """

    round: int
    call: str
    members: list[int]
    data: Any
    versions: dict[int, int]
    divisor: int = 1

    def divide(self, dtype: torch.dtype) -> None:
        """To be called before the result is shared."""
        if self.divisor > 1:
            as_tensor(self.data, dtype).div_(self.divisor)
            self.divisor = 1


@dataclass
class RoundInput:
    """One member's contribution to a round that the leader carries."""

    call: str
    x: Bytes | None
    version: int


@dataclass
class RoundState:
    """One member's state of the rounds of one channel.

    asked: the newest round that an engine could not carry here, so that the others were asked to repeat it.
    repeat: the newest round that another member asked to repeat, by rank. not_reached: a round that a member
    had not reached when it was asked, by rank. contributions: as leader, by round and rank.
    """

    members: set[int]
    round: int = 0
    call: str = ""
    leader: int | None = None
    last: Result | None = None
    contributions: dict[int, dict[int, RoundInput]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    asked: int = 0
    repeat: dict[int, int] = field(default_factory=dict)
    not_reached: dict[int, int] = field(default_factory=dict)


def member_ranks(value: Any, size: int) -> list[int]:
    """The members that a result claims to have. Raises FrameRejected for what is no list of ranks."""
    if not isinstance(value, list) or not all(isinstance(r, int) and 0 <= r < size for r in value):
        raise FrameRejected("meta", "a result without a list of its members")
    return value
