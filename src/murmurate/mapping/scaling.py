"""How long a policy update takes with several learners, from what its parts take (Zhang, eq. 5.1 to 5.6).

B is the batch of all learners, b = B / L that of each. A scaling factor is the speed-up for each learner that
was added: seconds of one learner over L times the seconds of L (Zhang, section 1.5.5). The printed first
halves of eq. 5.3 and 5.6 leave the L out, their second halves have it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchCosts:
    """Seconds that one batch of a certain size takes: to be drawn, to go through the net and back, to move
    the parameters, and to have its priorities updated."""

    sample: float
    forward: float
    backward: float
    update: float
    priority: float

    @property
    def replay(self) -> float:
        return self.sample + self.priority

    @property
    def total(self) -> float:
        return self.replay + self.forward + self.backward + self.update

    def times(self, factor: float) -> BatchCosts:
        """As if everything took so many times as long, on cores that are shared, say."""
        return BatchCosts(*(factor * x for x in vars(self).values()))


@dataclass(frozen=True)
class ExchangeCosts:
    """Seconds: a sub-batch to its learner, a gradient or a vector of parameters to where it is averaged or
    back, and the mean over L learners."""

    average: float
    weights: float = 0.0
    sub_batch: float = 0.0


def apex_seconds(whole: BatchCosts) -> float:
    """Of an update with one learner (eq. 5.2)."""
    return whole.total


def parallel_apex_seconds(whole: BatchCosts, part: BatchCosts, exchange: ExchangeCosts) -> float:
    """Of an update with L learners that mean their gradients, and one replay for all (eq. 5.1).

    whole: of a batch of B, which the replay is asked for. part: of b = B / L, which each learner works on.
    """
    moved = exchange.sub_batch + 2 * exchange.weights
    return whole.replay + moved + part.forward + part.backward + exchange.average + part.update


def spo_seconds(part: BatchCosts, exchange: ExchangeCosts, period: int) -> float:
    """Of an update with L learners that each have a bank, and mean their parameters every ``period`` (H)
    updates (eq. 5.5)."""
    if period < 1:
        raise ValueError(f"period counts updates between means and is at least 1, not {period}")
    return part.total + (2 * exchange.weights + exchange.average) / period


def scaling_factor(alone_seconds: float, together_seconds: float, learners: int) -> float:
    """1 if L learners make an update of the same batch in a 1/L of the time."""
    return alone_seconds / (learners * together_seconds)


def spo_scaling_factor(alone_seconds: float, exchange: ExchangeCosts, learners: int, period: int) -> float:
    """Where a batch of B / L takes a 1/L of the time of B (eq. 5.6)."""
    exchanged = 2 * exchange.weights + exchange.average
    return 1.0 / (1.0 + exchanged * learners / (alone_seconds * period))


def parallel_apex_scaling_factor(whole: BatchCosts, forward_part: float, exchange: ExchangeCosts) -> float:
    """Where forward and backward take the same, L times as long for B as for B / L, an update of the
    parameters nothing, and a 1/L of the replay's time is left out (eq. 5.3)."""
    rest = whole.replay + exchange.sub_batch + 2 * exchange.weights + exchange.average
    return 1.0 - 1.0 / (1.0 + 2.0 * forward_part / rest)
