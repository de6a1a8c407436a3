"""Every field of every config has a sentence of help, and every number has a range."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import pytest

from murmurate import plugins
from murmurate.cli.options import field_docs
from murmurate.evaluation.interface import Evaluation
from murmurate.ranges import numbers_of
from murmurate.replicator.learner import LearnerConfig
from murmurate.sources.interface import SourceConfig
from murmurate.spec import World
from murmurate.strategies.interface import Strategy

_BASES = {
    "agents": LearnerConfig,
    "workloads": LearnerConfig,
    "strategies": Strategy,
    "sources": SourceConfig,
    "evaluation": Evaluation,
    "worlds": World,
    "datasets": World,
    "recipes": object,  # a recipe's file may have all of them
}


def with_parts(config: type) -> Iterator[type]:
    """``config``, and the configs in its fields."""
    yield config
    for kind in typing.get_type_hints(config).values():
        for part in (kind, *typing.get_args(kind)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from with_parts(part)


def check_ranges_of(config: type) -> None:
    for name, kinds in numbers_of(config).items():
        bare = [kind.type.__name__ for kind in kinds if not kind.annotated]
        assert not bare, (
            f"{config.__qualname__}.{name} takes any {bare[0]}: give it a range, such as PositiveInt or "
            f"Annotated[{bare[0]}, Range(0, 10)] (murmurate.ranges)"
        )


def check_sentences_of(config: type) -> None:
    """Check the fields that are options: not nested configs, nor fields that the recipe's name sets."""
    documented = field_docs(config)
    kinds = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        nested = any(map(dataclasses.is_dataclass, (kinds[field.name], *typing.get_args(kinds[field.name]))))
        if field.init and not nested and "in_name" not in field.metadata:
            assert documented.get(field.name), (
                f"{config.__qualname__}.{field.name} has no help: write '{field.name}: a sentence.' in the "
                f"docstring of {config.__qualname__}"
            )


def _configs_of_other_packages() -> list[type]:
    """Murmurate's own configs are checked by its own tests."""
    bases = tuple(base for base in _BASES.values() if base is not object)
    configs = [
        config
        for folder, base in _BASES.items()
        for config in plugins.classes(f"murmurate.{folder}", base)
        if dataclasses.is_dataclass(config) and any(base in config.__mro__ for base in bases)
    ]
    return [c for c in dict.fromkeys(configs) if not c.__module__.startswith("murmurate.")]


every_config = pytest.mark.parametrize(
    "config", _configs_of_other_packages(), ids=lambda config: vars(config).get("name", config.__name__)
)


@every_config
def test_each_number_has_its_range(config):
    for part in with_parts(config):
        check_ranges_of(part)


@every_config
def test_each_option_has_its_sentence(config):
    for part in with_parts(config):
        if not part.__module__.startswith("murmurate."):  # those have tests of their own
            check_sentences_of(part)
