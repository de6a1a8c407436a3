"""What a member knows of the rounds of one channel's collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from murmurate.buffers import Bytes, as_tensor


@dataclass
class Result:
    """who: took part. parts: the vectors [N] that come of it, one, or one for each of ``who``; still to be
    divided by ``divisor``."""

    round: int
    call: str
    who: list[int]
    parts: Any  # a buffer of all of them, in order; None if there is nothing
    versions: dict[int, int]
    divisor: int = 1

    def divide(self, dtype: torch.dtype) -> None:
        """Before anybody else sees it."""
        if self.divisor > 1:
            as_tensor(self.parts, dtype).div_(self.divisor)
            self.divisor = 1


@dataclass
class Part:
    call: str
    x: Bytes | None
    version: int


@dataclass
class Memory:
    """What one member knows of the rounds of one channel.

    asked: the newest round that this member could not carry by an engine. again: the same of others, by rank.
    behind: the round to which a member had not come when it was asked, by rank.
    """

    members: set[int]
    round: int = 0
    call: str = ""
    leader: int | None = None
    last: Result | None = None
    parts: dict[int, dict[int, Part]] = field(default_factory=dict)  # as leader: by round, by rank
    failed: dict[int, str] = field(default_factory=dict)
    asked: int = 0
    again: dict[int, int] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)
