"""What a client needs for the exchange with a centre: whether the centre is alive, and its replies."""

from __future__ import annotations

from murmurate.fabric.interface import Channel, FabricError, Message
from murmurate.strategies.interface import centre_of

_POLL_SECONDS = 0.05  # the longest delay in noticing a death


def require_centre(channel: Channel, lost: str) -> None:
    """Raise FabricError, naming the rank and what is ``lost`` with it, if the centre is lost."""
    centre = centre_of(channel)
    if channel.has_lost(centre):
        raise FabricError(
            f"rank {centre}, which kept the centre, is dead or out of reach, and with it {lost}. "
            "A run goes on from its last checkpoint: murmurate resume; a script of your own has to be "
            "started again."
        )


def discard_replies(channel: Channel, tag: str) -> None:
    """Drop replies that are no longer awaited: those to pushes of a former leader, or of the process that
    this one replaced."""
    while channel.receive(tag) is not None:
        pass


def wait_for_reply(channel: Channel, tag: str, deadline_seconds: float, lost: str) -> Message | None:
    """The centre's next message under ``tag``; None if the deadline passes first. A deadline of 0 never
    waits.

    Raises FabricError if the centre dies meanwhile.
    """
    if not deadline_seconds:
        return channel.receive(tag)
    seconds_left = deadline_seconds
    while True:
        reply = channel.wait(tag, min(seconds_left, _POLL_SECONDS))
        if reply is not None:
            return reply
        seconds_left -= _POLL_SECONDS
        require_centre(channel, lost)
        if seconds_left <= 0:
            return None
