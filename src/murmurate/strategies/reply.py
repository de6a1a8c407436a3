"""Requests to the rank that keeps the centre: whether it lives, and its answers."""

from __future__ import annotations

from murmurate.fabric.interface import Channel, FabricError, Message
from murmurate.strategies.interface import centre_of

_POLL_SECONDS = 0.05  # how late a death may be noticed


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
    """Drop answers that nobody waits for any more: to pushes of a former incarnation or leader."""
    while channel.receive(tag) is not None:
        pass


def answer(channel: Channel, tag: str, deadline_seconds: float, lost: str) -> Message | None:
    """The centre's next message under ``tag``; None at the deadline, where 0 never waits.

    Raises FabricError if the centre dies meanwhile.
    """
    if not deadline_seconds:
        return channel.receive(tag)
    left = deadline_seconds
    while True:
        found = channel.wait(tag, min(left, _POLL_SECONDS))
        if found is not None:
            return found
        left -= _POLL_SECONDS
        demand_centre(channel, lost)
        if left <= 0:
            return None
