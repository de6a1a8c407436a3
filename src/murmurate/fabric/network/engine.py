"""The protocol of engines, which execute collectives in which no member is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Attempt:
    """One member's part in a round (a collective call) that an engine tries to execute.

    round, call: the round's number, and the name of the collective; the same on all members. members: ranks
    of the fabric, ascending, with this member's. x: [N] on the CPU, not to be changed; None if the call needs
    no vector of this member. published: the newest version of this member's register. should_abort: whether
    to give up; called with the lock held.
    """

    rank: int
    round: int
    call: str
    members: list[int]
    x: Tensor | None
    published: int
    should_abort: Callable[[], bool]

    @property
    def others(self) -> list[int]:
        return [rank for rank in self.members if rank != self.rank]


@dataclass(frozen=True)
class EngineResult:
    """The result of an attempt. data: a buffer of vectors, still to be divided by ``divisor``. versions: by
    rank, the newest version in the member's register before the round."""

    data: Any
    versions: dict[int, int]
    divisor: int = 1


class Engine(Protocol):
    def execute(self, attempt: Attempt) -> EngineResult | None:
        """The round's result, or None if the attempt was aborted. To be called without the lock."""
        ...
