"""Whether the replicas of a strategy meet inside a step, which collectives there need."""

from __future__ import annotations

from murmurate.errors import Refusal
from murmurate.strategies.interface import Strategy


def meets(strategy: Strategy) -> bool:
    """Whether the members of a step are at the same step together, or alone by themselves."""
    return strategy.synchronous or not strategy.needs


def check_meeting(strategy: Strategy, what: str) -> None:
    """Raise Refusal if the strategy's members go each at its own pace: nobody would come to a mean."""
    if not meets(strategy):
        raise Refusal(
            f"{strategy.name} cannot give {what}: its replicas do not wait for one another, so no step has "
            "all of them in it. Use all-reduce or local-sgd, or leave it out (take each replica's own, say)."
        )
