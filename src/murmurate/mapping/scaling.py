"""The time of a policy update with several learners, from the times of its parts (Zhang 2022, eq. 5.1 to
5.6).

A scaling factor is the speed-up divided by the number L of learners (Zhang 2022, section 1.5.5). The first
printed forms of eq. 5.3 and 5.6 omit the L, the second have it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchCosts:
    """Seconds for one batch: to draw it (``sample``), for the forward and backward passes, to update the
    parameters, and to update the batch's priorities (``priority``)."""

    sample: float
    forward: float
    backward: float
    update: float
    priority: float

    @property
    def total(self) -> float:
        """Seconds for an update with one learner (eq. 5.2)."""
        return self.sample + self.forward + self.backward + self.update + self.priority


def parallel_apex_seconds(whole: BatchCosts, part: BatchCosts, exchange_seconds: float) -> float:
    """Seconds for an update of data-parallel Ape-X (eq. 5.1): one replay serves L learners, which average
    their gradients in every update. whole: costs of the whole batch. part: costs of one learner's share of
    it. exchange_seconds: to average the gradients, and to move shares, gradients and parameters."""
    work = part.forward + part.backward + part.update
    return whole.sample + work + whole.priority + exchange_seconds


def spo_seconds(part: BatchCosts, average_seconds: float, period: int) -> float:
    """Seconds for an update with L learners that each have their own part of the replay, and average their
    parameters every ``period`` (H) updates (eq. 5.5). part: costs of one learner's share of a batch.
    average_seconds: to average the parameters, moving them there and back included."""
    if period < 1:
        raise ValueError(f"period is {period}; it must be at least 1 update")
    return part.total + average_seconds / period


def scaling_factor(alone_seconds: float, together_seconds: float, learners: int) -> float:
    """The speed-up divided by L: 1 if L learners need 1/L of the time for an update with the same total
    batch."""
    return alone_seconds / (learners * together_seconds)
