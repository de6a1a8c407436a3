"""Costs that are written down, for tests of plans."""

from __future__ import annotations

import dataclasses
from typing import Any

from murmurate.mapping.candidates import (
    runs_with_exchange,
)
from murmurate.mapping.lines import Line
from murmurate.mapping.primitives import PRIMITIVES
from murmurate.mapping.profile import DeviceProfile, Link, RecipeCosts, exchange_key, key
from murmurate.training.run import Run

FAST = Link(1e-9, 1e15)


def flat(a: float) -> Line:
    return Line(a, 0.0, (a, 0.0), (a, 0.0), (1, 1024))


def profile_of(run: Run, cores: int = 2, deviation: float = 0.0, **seconds: float) -> DeviceProfile:
    """In which an exchange of the usual period takes 1 ms, and every primitive that is not given nothing."""
    lines = {name: flat(seconds.get(name, 0.0)) for name in PRIMITIVES}
    costs = RecipeCosts(lines, dict.fromkeys(PRIMITIVES, 1.0), deviation, 1000)
    profile = DeviceProfile(cores, recipes={key(run): costs}, links={"network": FAST})
    for each in runs_with_exchange(run, cores):
        profile.exchange[exchange_key(each.strategy, each.replicas)] = flat(1e-3)
    return profile


def with_source(run: Run, **fields: Any) -> Run:
    source: Any = run.source
    return dataclasses.replace(run, source=dataclasses.replace(source, **fields))
