"""Learning rates fall over the whole run, also if replicas die or differ in speed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.strategies import strategy
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.training import checkpoint
from murmurate.training.run import Run
from murmurate.training.schedules import SharedSchedules
from short_runs import altered, train


def a_run(name: str = "all-reduce", replicas: int = 2) -> Run:
    run = dataclasses.replace(recipe("cartpole-ppo"), strategy=strategy(name)(), replicas=replicas)
    run = altered(run, simulators=4)
    learner = dataclasses.replace(run.learner, steps=16, epochs=1, minibatches=4)  # type: ignore[call-arg]
    return dataclasses.replace(run, learner=learner, env_steps=64 * 2_000)


def scheduled() -> Replica:
    return Replica("net", nn.Linear(2, 1), torch.optim.SGD, schedule=lambda count: 1.0 - count)


def counts(run: Run, own_batches: int, env_steps_a_batch: int) -> tuple[list[int], list[int]]:
    """The schedule's counts after each batch, and the replica's own updates."""
    replica, seen, own = scheduled(), [], []
    schedules = SharedSchedules(run, [replica])
    for batch in range(1, own_batches + 1):
        replica.clock += 4
        schedules.follow(batch * env_steps_a_batch, replica.clock)
        seen.append(replica.steps_taken())
        own.append(replica.clock)
    return seen, own


def test_without_faults_schedules_count_the_own_updates() -> None:
    seen, own = counts(a_run(), own_batches=1_000, env_steps_a_batch=2 * 64)
    assert seen == own


@pytest.mark.parametrize("env_steps_a_batch", [64, 6 * 64])
def test_one_that_makes_more_or_fewer_updates_than_planned_follows_the_run(env_steps_a_batch: int) -> None:
    """Its peer is dead, or five times as fast; with 4 updates a batch, the plan is 4,000 each."""
    run = a_run()
    batches = (run.env_steps or 0) // env_steps_a_batch
    seen, own = counts(run, batches, env_steps_a_batch)
    expected = [(batch + 1) * env_steps_a_batch * 4 / (2 * 64) for batch in range(batches)]
    assert own[-1] in (8_000, pytest.approx(1_333, abs=4))
    assert max(abs(a - b) for a, b in zip(seen, expected, strict=True)) < 0.02 * 4_000


def test_in_a_run_that_ends_by_updates_these_count() -> None:
    """The peer is dead, so after 3,000 updates the env steps are those of 1,500."""
    seen, own = counts(dataclasses.replace(a_run(), updates=3_000), own_batches=750, env_steps_a_batch=64)
    assert seen == own


def test_in_a_run_that_ends_by_updates_a_count_of_all_is_corrected_by_the_own() -> None:
    """Hogwild counts its two replicas' updates, and one of them is dead."""
    run, replica = dataclasses.replace(a_run("hogwild"), updates=3_000), scheduled()
    schedules = SharedSchedules(run, [replica])
    for batch in range(1, 751):
        replica.clock += 4
        schedules.follow(64 * batch, replica.clock)
        assert abs(replica.steps_taken() - 2 * replica.clock) < 0.02 * 6_000


@pytest.mark.parametrize("name", ["dpsgd", "parameter-server"])
@pytest.mark.parametrize("env_steps_a_batch", [64, 6 * 64])
def test_an_estimate_of_all_updates_is_corrected(name: str, env_steps_a_batch: int) -> None:
    """A node of DPSGD assumes that others make as many updates: not if these are dead, or faster. The centre
    of a parameter server assumes ``period`` gradients in a push, which may have more."""
    run, replica = a_run(name), scheduled()
    replica.count_steps_by(lambda: 2 * replica.clock)
    schedules = SharedSchedules(run, [replica])
    for batch in range(1, (run.env_steps or 0) // env_steps_a_batch + 1):
        replica.clock += 4
        schedules.follow(batch * env_steps_a_batch, replica.clock)
        made_by_all = batch * env_steps_a_batch * 4 // 64
        assert abs(replica.steps_taken() - made_by_all) < 0.02 * 8_000


def test_the_rate_of_a_parameter_server_falls_to_its_end_although_pushes_have_several_gradients(
    tmp_path: Path,
) -> None:
    """Of 60 gradients, the centre makes about 40 steps."""
    strategy_ = ParameterServer(wait=False)
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy_, replicas=2, launcher="inline")
    run = altered(run, simulators=2, eval_episodes=1, env_steps=960)
    train(run, tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "last"
    centre, client = (checkpoint.read_part(last, rank)["replicas"]["a2c"]["replica"] for rank in (2, 0))
    assert centre["clock"] < 50
    assert centre["learning_rates"][0] < 0.15 * run.learner.learning_rate  # type: ignore[attr-defined]
    assert client["learning_rates"][0] < 0.15 * run.learner.learning_rate  # type: ignore[attr-defined]


def test_one_that_joins_goes_on_as_the_one_that_gave_it_its_state() -> None:
    run, donor, joiner = a_run(), scheduled(), scheduled()
    one, other = SharedSchedules(run, [donor]), SharedSchedules(run, [joiner])
    donor.clock = 2_000
    one.follow(64 * 1_000 + 64 * 500, donor.clock)
    joiner.clock = donor.clock
    other.load(one.state())
    assert joiner.steps_taken() == donor.steps_taken() == 3_000


def test_single_replicas_are_left_alone() -> None:
    replica = scheduled()
    schedules = SharedSchedules(a_run(replicas=1), [replica])
    replica.clock = 10
    schedules.follow(64 * 1_900, replica.clock)
    assert replica.steps_taken() == 10


def in_turns() -> Run:
    """Ten times each of two replicas makes 64 env steps, and then 300 batches."""
    run = dataclasses.replace(recipe("cartpole-arm"), strategy=strategy("all-reduce")(), replicas=2)
    run = altered(run, simulators=4, collect_env_steps=64, minibatches=300)
    return dataclasses.replace(run, env_steps=10 * 2 * 64)


@pytest.mark.parametrize("ahead", [0, 1])
def test_many_batches_after_the_same_env_steps_count_one_by_one(ahead: int) -> None:
    """Also if the peer is a turn ahead."""
    replica = scheduled()
    schedules = SharedSchedules(in_turns(), [replica])
    for batch in range(3_000):
        replica.clock += 1
        turn = batch // 300 + 1
        schedules.follow((turn + min(turn + ahead, 10)) * 64, replica.clock)
        assert replica.steps_taken() == batch + 1


def test_with_a_dead_peer_a_turn_ends_where_the_run_has_come_to() -> None:
    replica = scheduled()
    schedules = SharedSchedules(in_turns(), [replica])
    for turn in range(1, 21):
        for _ in range(300):
            replica.clock += 1
            schedules.follow(turn * 64, replica.clock)
        assert replica.steps_taken() == 300 * (turn // 2 if turn > 4 else turn)  # whole turns of both
