"""A graph for strategies that gossip: receive from the positions 1 and 3 before, on a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class SkipRing:
    name: ClassVar[str] = "skip-ring"

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return tuple(sorted({(position - hop) % size for hop in (1, 3)} - {position}))

    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return tuple(sorted({(position + hop) % size for hop in (1, 3)} - {position}))
