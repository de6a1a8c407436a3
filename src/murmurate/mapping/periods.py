"""The period of a strategy: H, tau or B, the number of updates between two of its exchanges."""

from __future__ import annotations

import dataclasses

from murmurate.strategies.interface import Strategy


def period_of(strategy: Strategy) -> int:
    """Number of updates of a replica between two exchanges of ``strategy``; 1 if it has no period."""
    return max(1, getattr(strategy, strategy.period_field, 1))


def with_period(strategy: Strategy, period: int) -> Strategy:
    """``strategy``, which has a period, with another one."""
    return dataclasses.replace(strategy, **{strategy.period_field: period})


def with_usual_period(strategy: Strategy) -> Strategy:
    """``strategy`` with the period that its class has by default, if it has one."""
    usual = getattr(type(strategy), strategy.period_field, None)
    return strategy if usual is None else with_period(strategy, usual)


def label(strategy: Strategy) -> str:
    """NAME, or NAME:PERIOD if the period is not the usual one, as ``--strategies`` takes it."""
    period = period_of(strategy)
    return strategy.name + f":{period}" * (period != period_of(with_usual_period(strategy)))
