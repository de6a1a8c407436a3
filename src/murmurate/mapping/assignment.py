"""Places a learner, its replay manager and its data storage on devices (Zhang 2022, section 4.4.2, steps 1 to
3).

In the relaxed loop (section 4.3.1) batches are drawn ahead, so that training and the replay manager overlap:
gradient steps per second are min(TP_train, TP_RMM) (eq. 4.2). TP_RMM is the replay manager's rate of drawing
a batch and setting its priorities. Differs from the thesis: if the two are on different devices, their times
include the link, which may take longer than the work itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from murmurate.errors import Refusal
from murmurate.mapping.profile import Link, RecipeCosts

_WORD_BYTES = 4  # bytes of an index, or of a priority
_ROUNDING = 1e-9  # rates that differ by no more than this share count as equal
HOST = "cpu"


@dataclass(frozen=True)
class Device:
    """A device that can run at least one of the three parts.

    costs: these have lines for ``forward``, ``backward`` and ``update`` if the device can train, and for
    ``sample`` and ``priority`` if it can manage a replay. link: the link from the host; None for the host
    itself. shares: whether training and the replay manager slow each other down on this device, as on a GPU;
    otherwise each has its own resources. bytes: bytes of memory for the storage.
    """

    name: str
    costs: RecipeCosts
    link: Link | None = None
    shares: bool = False
    bytes: float = float("inf")

    def train_seconds(self, batch: int) -> float | None:
        """Seconds of a gradient step on ``batch`` rows that are on the device."""
        return self._sum(("forward", "backward", "update"), batch)

    def draw_seconds(self, batch: int) -> float | None:
        """Seconds of drawing a batch and setting its priorities, without the link."""
        return self._sum(("sample", "priority"), batch)

    def messages_seconds(self, batch: int) -> float:
        """Seconds in which the indices of a batch go over the link, and its priorities come back."""
        return 2 * self.transfer_seconds(_WORD_BYTES * batch)

    def transfer_seconds(self, size: float) -> float:
        return 0.0 if self.link is None else self.link.seconds(size)

    def _sum(self, names: Sequence[str], batch: int) -> float | None:
        lines = self.costs.lines
        if any(name not in lines for name in names):
            return None
        return sum(lines[name].seconds(0 if name == "update" else batch) for name in names)


@dataclass(frozen=True)
class Assignment:
    """learner, replay, storage: names of devices. steps_per_second: gradient steps per second. why: the
    reason for each of these three devices. others: gradient steps per second of every other pair of devices
    for learner and replay."""

    learner: str
    replay: str
    storage: str
    steps_per_second: float
    why: tuple[str, str, str]
    others: dict[tuple[str, str], float] = field(default_factory=dict)


def steps_per_second(
    learner: Device, replay: Device, batch: int, row_bytes: float, stored: int = 0
) -> float | None:
    """Gradient steps per second by eq. 4.2, with learner and replay manager on these devices; None if a
    device cannot run its part.

    The rows of a batch are sent to the learner's device while it trains on the previous batch. If both are on
    one device with room for ``stored`` rows, nothing is sent.
    """
    train, draw = learner.train_seconds(batch), replay.draw_seconds(batch)
    if train is None or draw is None:
        return None
    rows = learner.transfer_seconds(row_bytes * batch)
    if learner.name == replay.name:
        both = train + draw if learner.shares else max(train, draw)
        return 1 / (both if learner.bytes >= stored * row_bytes else max(both, rows))
    train = max(train, rows)
    # from the learner's device the priorities go to the host, and on to that of the replay manager
    messages = replay.messages_seconds(batch) + learner.transfer_seconds(_WORD_BYTES * batch)
    return 1 / max(train, draw + messages)


def assign(devices: Sequence[Device], batch: int, row_bytes: float, actors: int, stored: int) -> Assignment:
    """Choose the devices of learner, replay manager and storage.

    row_bytes: E, the bytes of a transition. actors: number of actors, each of which inserts one transition
    from the host per gradient step. stored: number of transitions that the storage must hold. Raises Refusal
    if no device can train, none can manage a replay, or none has room for the storage.
    """
    rates = {
        (a.name, b.name): rate
        for a in devices
        for b in devices
        if (rate := steps_per_second(a, b, batch, row_bytes, stored)) is not None
    }
    if not rates:
        raise Refusal(
            "none of these devices can train, or none can draw from a replay. Add this host's profile: "
            "murmurate plan RECIPE --profile."
        )
    trains = {d.name: 1 / s for d in devices if (s := d.train_seconds(batch)) is not None}
    draws = {d.name: 1 / s for d in devices if (s := d.draw_seconds(batch)) is not None}
    # Step 1: the learner on the device where it trains fastest, of those with the highest rate
    least = max(rates.values()) * (1 - _ROUNDING)
    learner = max((a for (a, _), rate in rates.items() if rate >= least), key=lambda name: trains[name])
    # Step 2: the replay manager on a device that does not slow the learner: preferably the learner's own,
    # then the host, then the fastest
    equal = [b for (a, b), rate in rates.items() if a == learner and rate >= least]
    replay = min(equal, key=lambda name: (name != learner, name != HOST, -draws[name]))
    # Step 3: the storage on the device with the least traffic, of those with room for it
    traffic = {
        d.name: (d.name != replay) * batch * _WORD_BYTES
        + (d.name != learner) * batch * row_bytes
        + (d.name != HOST) * actors * row_bytes
        for d in devices
        if d.bytes >= stored * row_bytes
    }
    if not traffic:
        raise Refusal(f"no device has room for {stored:,} transitions of {row_bytes:,.0f} bytes.")
    storage = min(traffic, key=lambda name: (traffic[name], name != HOST))
    rate = rates[learner, replay]
    others = {pair: value for pair, value in rates.items() if pair != (learner, replay)}
    limits = "the learner" if rate >= trains[learner] * (1 - _ROUNDING) else "drawing, or the link,"
    return Assignment(
        learner,
        replay,
        storage,
        rate,
        (
            f"the highest rate is with the learner on {learner}: {trains[learner]:,.0f} gradient steps/s",
            f"the replay manager on {replay} draws {draws[replay]:,.0f} batches/s: {limits} limits",
            f"storage on {storage} moves {traffic[storage]:,.0f} bytes for each gradient step",
        ),
        others,
    )
