"""What a learner asks of the rank that keeps the centre: that it lives, and its answer."""

from __future__ import annotations

from murmurate.fabric.interface import Channel, FabricError, Message
from murmurate.strategies.interface import centre_of

_GLANCE_SECONDS = 0.05  # how late the news of a death may be


def demand_centre(channel: Channel, lost: str) -> None:
    """Raise FabricError, naming the rank and what was ``lost`` with it, if there is no hope of the centre."""
    centre = centre_of(channel)
    if channel.has_lost(centre):
        raise FabricError(
            f"rank {centre}, which kept the centre, is dead or out of reach, and with it {lost}. "
            "Where there is a run folder, go on from its last checkpoint: murmurate resume; a script of your "
            "own has to be started again."
        )


def clear(channel: Channel, tag: str) -> None:
    """Throw away answers that nobody waits for any more: to pushes of a former life or leader."""
    while channel.receive(tag) is not None:
        pass


def answer(channel: Channel, tag: str, deadline_seconds: float, lost: str) -> Message | None:
    """The centre's next message under ``tag``; None at the deadline. Raises FabricError once it is dead."""
    left = deadline_seconds
    while True:
        message = channel.wait(tag, min(left, _GLANCE_SECONDS))
        if message is not None:
            return message
        left -= _GLANCE_SECONDS
        demand_centre(channel, lost)
        if left <= 0:
            return None
