"""A source of another package is planned if it tells how much work a batch is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from murmurate.errors import Refusal
from murmurate.mapping import pilot
from murmurate.mapping.lines import Line
from murmurate.mapping.pilot import pilot_run
from murmurate.mapping.primitives import PRIMITIVES
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, key
from murmurate.mapping.search import search
from murmurate.ranges import PositiveInt
from murmurate.recipes import recipe
from murmurate.sources.interface import BatchShape, RunView, Source, SourceConfig, SourceContext
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.training.run import Run

MILLISECOND = 1e-3


@dataclass(frozen=True)
class Untold(SourceConfig):
    """envs: number of simulators, under a name that no plan knows."""

    envs: PositiveInt = 4

    gives: ClassVar[str] = "rollouts"

    def batches(self, run: RunView) -> int | None:
        return RolloutSourceConfig(self.envs).batches(run)

    def open(self, context: SourceContext) -> Source:
        return RolloutSourceConfig(self.envs).open(context)


@dataclass(frozen=True)
class Told(Untold):
    def batch_shape(self, run: RunView) -> BatchShape:
        steps = run.learner.requires.steps
        return BatchShape(self.envs, groups=1, steps=steps, rows=steps * self.envs)


@dataclass(frozen=True)
class Helped(Told):
    def decoding_processes(self, run: RunView) -> int:
        return 2


@dataclass(frozen=True)
class Sized(Told):
    size: str = "depth"

    def cost_settings(self) -> dict[str, Any]:
        return {self.size: 2}


def with_source(source: SourceConfig) -> Run:
    return dataclasses.replace(recipe("cartpole-a2c"), source=source)  # 8 steps for each batch


def test_its_pilot_is_measured() -> None:
    run = with_source(Told())
    [only] = pilot.sizes(run)
    found = pilot.measure(only, 0.05)
    assert (found.simulators, found.rows) == (4, 32)
    assert all(min(found.seconds[name]) > 0 for name in ("act", "simulate", "collect", "forward"))


def test_its_candidates_are_predicted_by_its_shape() -> None:
    run = with_source(Told())
    lines = {name: Line(0.0, 0.0, (0.0, 0.0), (0.0, 0.0), (1, 9)) for name in PRIMITIVES}
    lines["act"] = dataclasses.replace(lines["act"], b=MILLISECOND)
    lines["forward"] = dataclasses.replace(lines["forward"], a=8 * MILLISECOND)
    costs = RecipeCosts(lines, dict.fromkeys(PRIMITIVES, 1.0), 0.0, 99)
    [found] = search(run, DeviceProfile(1, recipes={key(run): costs}))
    assert found.prediction.env_steps_per_second == pytest.approx(4 * 8 / ((8 * 4 + 8) * MILLISECOND))
    helped = with_source(Helped())
    [found] = search(helped, DeviceProfile(4, recipes={key(helped): costs}))[:1]
    assert (found.run.source, found.prediction.bottleneck) == (Helped(), "actors")
    assert found.prediction.env_steps_per_second == pytest.approx(4 * 8 / (8 * 4 * MILLISECOND / 2))


def test_its_costs_are_its_own() -> None:
    usual = recipe("cartpole-a2c")
    assert len({key(usual), key(with_source(Told())), key(with_source(Helped()))}) == 3
    assert key(with_source(Told(8))) == key(with_source(Told()))
    deep, wide = with_source(Sized(size="depth")), with_source(Sized(size="width"))
    assert key(deep) != key(wide), "one value under two names"


def test_without_a_shape_it_is_refused() -> None:
    with pytest.raises(Refusal, match=r"its source tells no `batch_shape`"):
        pilot_run(with_source(Untold()))
