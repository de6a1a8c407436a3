"""What a learner asks of the rank that keeps the centre: that it lives, and its answer."""

from __future__ import annotations

from murmurate.fabric.interface import Fabric, FabricError, Letter
from murmurate.strategies.interface import centre_of

_GLANCE_SECONDS = 0.05  # how late the news of a death may be


def demand_centre(fabric: Fabric, lost: str) -> None:
    """Raise FabricError, naming the rank and what was ``lost`` with it, if the centre is dead."""
    centre = centre_of(fabric)
    if centre not in fabric.living():
        raise FabricError(
            f"rank {centre}, which kept the centre, died, and with it {lost}. "
            "Go on from the last checkpoint: murmurate resume."
        )


def answer(fabric: Fabric, tag: str, deadline_seconds: float, lost: str) -> Letter | None:
    """The centre's next letter under ``tag``; None at the deadline. Raises FabricError once it is dead."""
    left = deadline_seconds
    while True:
        letter = fabric.wait(tag, min(left, _GLANCE_SECONDS))
        if letter is not None:
            return letter
        left -= _GLANCE_SECONDS
        demand_centre(fabric, lost)
        if left <= 0:
            return None
