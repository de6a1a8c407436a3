"""The law of a replay service with several learners: nothing is lost or doubled by kills."""

from __future__ import annotations

from typing import Any, cast

import pytest

from murmurate.bench import _roles
from murmurate.bench._service_counts import _stored, service_run
from murmurate.bench.replay_service import ReplayServicePlan, measure
from murmurate.errors import Refusal, RunFailed
from murmurate.sources.replay_service import ReplayServiceSourceConfig
from waiting import DEADLINE_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_SECONDS)
@pytest.mark.parametrize("shards", [2, 4])
def test_kills_of_any_actor_or_sampler_lose_and_double_nothing(shards: int) -> None:
    plan = ReplayServicePlan(
        actors=4, shards=shards, samplers=4, simulators=4, seconds=2.0, kills=3, kill_draws=100, filled=2_000,
        batch=64, capacity=2**20,
    )  # fmt: skip
    result = measure(plan, lambda line: None)
    assert result["kills"] == 2 * 2 * plan.kills
    for name in ("lost_inserts", "doubled_inserts", "lost_draws", "doubled_draws"):
        assert result[name] == 0, name
    held = result["samples_per_insert_held"]["median"]
    assert 0.98 * plan.samples_per_insert <= held <= plan.samples_per_insert


@pytest.mark.parametrize("name", ["actors", "samplers", "shards"])
def test_processes_that_learners_cannot_share_are_refused(name: str) -> None:
    plan = ReplayServicePlan(**{name: 3})
    with pytest.raises(Refusal, match=f"--{name} is 3, and 2 learners share them equally. Use --{name} 4"):
        measure(plan, pytest.fail)


def test_overwritten_inserts_are_not_counted_as_lost() -> None:
    run = service_run(ReplayServicePlan(learners=1, shards=1, capacity=1_024, filled=64))
    state = {"replays": {"shard0": {"store": {"head": 1_025, "rows": {}}}}, "first": [None]}
    with pytest.raises(RunFailed, match=r"given 1,025 rows and holds 1,024: .* larger --capacity"):
        _stored(run, state)


class _Asked(Exception):
    """In place of a measurement."""


def test_a_learners_own_replay_is_as_large_and_as_full_as_its_part_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(members: int, work: Any, *arguments: Any, **options: Any) -> Any:
        raise _Asked(arguments[-1])

    monkeypatch.setattr(_roles, "run_together", ask)
    plan = ReplayServicePlan()
    with pytest.raises(_Asked) as asked:
        measure(plan, lambda line: None)
    own, source = asked.value.args[0], cast(ReplayServiceSourceConfig, service_run(plan).source)
    assert (own.capacity, own.filled) == (source.replay.capacity, source.replay.learning_starts)
    assert own.actors * own.simulators == source.simulators
