"""What carries a collective in which nobody is lost: an attempt that gives a result, or gives up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Attempt:
    """One member's part in a round that an engine is to carry.

    round, call: all members have the same. members: ranks of the fabric, ascending, the own one among them.
    x: [N] on the CPU, which must stay as it is; None where the call needs none of us. published: the newest
    version of the own register.
    hopeless: whether to give up by now; called with the lock held.
    """

    rank: int
    round: int
    call: str
    members: list[int]
    x: Tensor | None
    published: int
    hopeless: Callable[[], bool]

    @property
    def others(self) -> list[int]:
        return [rank for rank in self.members if rank != self.rank]


@dataclass(frozen=True)
class Carried:
    """parts: a buffer of what comes of the round, still to be divided by ``divisor``. versions: what each
    member had published before."""

    parts: Any
    versions: dict[int, int]
    divisor: int = 1


class Engine(Protocol):
    def carry(self, attempt: Attempt) -> Carried | None:
        """None if it gave up. To be called without the lock."""
        ...
