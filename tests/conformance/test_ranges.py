"""Every number of every config has a range. Configs are found by listing the rooms that have them."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import murmurate
from murmurate.conformance.test_configs import check_ranges_of, with_parts
from murmurate.datasets.tokens import Tokens
from murmurate.evaluation.interface import Evaluation
from murmurate.ranges import (
    AnyFloat,
    OutOfRange,
    PositiveInt,
    PositiveOrInfinite,
    UnitInterval,
    check_ranges,
    rounded_down,
)
from murmurate.replicator.learner import LearnerConfig
from murmurate.simulation.cluster import Cluster
from murmurate.sources.interface import SourceConfig
from murmurate.spec import World
from murmurate.strategies.interface import Strategy
from murmurate.training.run import Run

_BASES = (LearnerConfig, Strategy, SourceConfig, Evaluation, World)
_ROOMS = ("agents", "workloads", "strategies", "sources", "evaluation", "worlds", "datasets")


def _classes() -> Iterator[type]:
    yield from (Run, Cluster, Tokens)
    modules: list[Any] = []
    for room in _ROOMS:
        folder = Path(murmurate.__file__).parent / room
        modules += [
            importlib.import_module(found.name)
            for found in pkgutil.walk_packages([str(folder)], f"murmurate.{room}.")
        ]
    for module in modules:
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and dataclasses.is_dataclass(value) and set(_BASES) & set(value.__mro__):
                yield value


_FOUND = {part for config in _classes() for part in with_parts(config)}
CONFIGS = sorted(_FOUND, key=lambda config: config.__qualname__)


def test_the_configs_are_found() -> None:
    names = {config.__name__ for config in CONFIGS}
    assert {"A2C", "TopicModel", "GALA", "DPSGD", "ReplayConfig", "AtariWorld", "Placement", "Run"} <= names
    assert len(names) > 25


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_each_number_has_its_range(config: type) -> None:
    check_ranges_of(config)


@dataclasses.dataclass(frozen=True)
class _Inner:
    share: UnitInterval = 0.5
    shares: tuple[UnitInterval, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Outer:
    count: PositiveInt | None = None
    either: PositiveInt | UnitInterval = 2
    bare: float = 0.0
    any: AnyFloat = 0.0
    limit: PositiveOrInfinite = math.inf
    own: _Inner = dataclasses.field(default_factory=_Inner, metadata={"option": "inside"})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (_Outer(count=0), "count is 0; it must be at least 1."),
        (_Outer(count=2**60), "count is 1152921504606846976; it must be at most 9007199254740992."),
        (_Outer(either=-1), "either is -1; it must be at least 1 or from 0 to 1. Use --either 2."),
        (
            _Outer(either=1.5),
            "either is 1.5; it must be an integer at least 1 or from 0 to 1. Use --either 2",
        ),
        (_Outer(bare=math.nan), "bare is nan; it must be finite. Use --bare 0.0."),
        (_Outer(any=-math.inf), "any is -inf; it must be finite. Use --any 0.0."),
        (_Outer(any=-1e31), "any is -1e+31; it must be at least -1e+30. Use --any 0.0."),
        (_Outer(limit=0.0), "limit is 0.0; it must be above 0. Use --limit inf."),
        (_Outer(count=True), "count is True; it must be at least 1."),
        (_Outer(own=_Inner(-1.0)), "inside.share is -1.0; it must be from 0 to 1. Use --inside.share 0.5."),
        (_Outer(own=_Inner(shares=(0.0, 2.0))), "inside.shares is 2.0; it must be from 0 to 1."),
    ],
)
def test_a_number_outside_is_refused_by_the_name_of_its_option(config: Any, sentence: str) -> None:
    with pytest.raises(OutOfRange) as refusal:
        check_ranges(config)
    assert str(refusal.value).startswith(sentence)


def test_numbers_inside_are_accepted() -> None:
    check_ranges(_Outer(count=1, either=0.5, any=-3.0, limit=5, own=_Inner(1.0, (0.0, 1))))


def test_numbers_of_so_many_digits_are_not_rounded_down() -> None:
    """In binary 0.29 / 0.01 is below 29."""
    for hundredths in range(1, 100):
        assert rounded_down(hundredths / 100, 2) == hundredths / 100
    assert rounded_down(1 / 3, 2) == 0.33
    assert rounded_down(123_456.0, 2) == 120_000
    assert rounded_down(0.0999, 2) == 0.099
