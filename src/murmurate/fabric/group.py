"""A group of a fabric's members as a fabric of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmurate.fabric.interface import Capability, Channel, Fabric, checked_group


class GroupFabric:
    """A fabric of the members ``ranks`` (ascending) of ``fabric``. Its own ranks are positions in ``ranks``.

    Only these members make its channels. Raises ValueError if this member is not one of them.
    """

    def __init__(self, fabric: Fabric, ranks: Sequence[int]) -> None:
        self._fabric, self._ranks = fabric, checked_group(ranks, fabric.rank, fabric.size)
        self.rank, self.size = self._ranks.index(fabric.rank), len(self._ranks)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self._fabric.capabilities

    def living(self) -> Sequence[int]:
        living = set(self._fabric.living())
        return [position for position, rank in enumerate(self._ranks) if rank in living]

    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> Channel:
        group = range(self.size) if members is None else members
        return self._fabric.channel(name, like, [self._ranks[member] for member in group])
