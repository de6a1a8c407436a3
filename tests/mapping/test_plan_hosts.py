"""Plans for several hosts, on costs that are written down."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest
from written_costs import flat, profile_of, with_source

from murmurate.errors import Refusal
from murmurate.mapping import search as searching
from murmurate.mapping.candidates import (
    Candidate,
    candidates,
    named_strategies,
)
from murmurate.mapping.cost import predict
from murmurate.mapping.hosts import compute_model, on_hosts
from murmurate.mapping.learning import Learning, learned_by
from murmurate.mapping.profile import DeviceProfile, exchange_key, key
from murmurate.mapping.search import search
from murmurate.recipes import recipe
from murmurate.replica.clipping import NotFinite
from murmurate.simulation.monitor import Monitor
from murmurate.strategies import strategy
from murmurate.training.run import Run


@pytest.fixture
def one_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the best candidate of one host is simulated on several."""
    monkeypatch.setattr(searching, "_SIMULATED_CANDIDATES", 1)


def hosted(run: Run, profile: DeviceProfile, hosts: int = 2) -> dict[str, float]:
    """Env steps per second on several hosts relative to one host's, by strategy."""
    one = Candidate("", run, 0.0, "", "", predict(run, profile))
    return {
        whole.strategy.name: found.env_steps_per_second / one.prediction.env_steps_per_second
        for _, whole, found in on_hosts([one], run, profile, hosts, lambda line: None)
    }


@pytest.mark.parametrize(
    "run",
    [
        recipe("cartpole-a2c"),
        with_source(recipe("cartpole-impala"), actors=2, simulators=8),
        dataclasses.replace(
            with_source(recipe("cartpole-dqn"), simulators=8),
            restarts=2,
            evaluate_every_env_steps=5_000,
        ),
    ],
    ids=lambda run: run.recipe,
)
def test_hosts_that_a_network_does_not_delay_are_as_fast_as_one_each(run: Run) -> None:
    ratios = hosted(run, profile_of(run, cores=4, act=5e-4, simulate=1e-3, forward=2e-3))
    assert ratios == pytest.approx({"all-reduce": 2.0, "local-sgd": 2.0, "gala": 2.0}, rel=0.02)


def test_replicas_on_hosts_wait_for_the_slowest_and_rarer_rounds_less() -> None:
    run = recipe("cartpole-a2c")
    ratios = hosted(run, profile_of(run, deviation=0.5, forward=1e-2), hosts=4)
    assert 0.5 < ratios["all-reduce"] / 4 < 0.8
    assert ratios["all-reduce"] < ratios["local-sgd"]
    assert compute_model(2.0, 0.0) == "lognormal:2,0"


@pytest.mark.usefixtures("one_simulated")
def test_one_replica_a_host_keeps_the_runs_own_strategy_with_its_settings() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy("local-sgd")(period=5))
    found = search(run, profile_of(run, cores=1, forward=1e-2), hosts=2)
    assert "--strategy" not in next(each.name for each in found if each.run.strategy == run.strategy)
    assert any("--strategy all-reduce" in each.name for each in found)


@pytest.mark.usefixtures("one_simulated")
def test_no_more_cores_are_busy_than_there_are() -> None:
    run = recipe("cartpole-a2c")
    found = search(run, profile_of(run, cores=2, forward=2e-4), hosts=2)
    assert max(each.prediction.busy for each in found) <= 4


@pytest.mark.usefixtures("one_simulated")
def test_one_replica_a_host_gets_strategies_that_were_learned_with() -> None:
    """GALA's runs missed the target, those of others did not."""
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy("gala")())
    profile = profile_of(run, cores=1, forward=1e-2)
    exponents = {"replicas": 0.1, "period": 0.1}
    profile.recipes[key(run)].learning = Learning(
        100.0, 1e5, exponents, 2, missed=["asynchrony"], of=learned_by(run)
    )
    found = search(run, profile, "time", hosts=2)
    assert found
    assert all(each.run.strategy.name != "gala" for each in found)


def test_what_cannot_be_simulated_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise Refusal("too little memory")

    monkeypatch.setattr("murmurate.mapping.hosts.simulate", refuse)
    run, said = recipe("cartpole-a2c"), list[str]()
    with pytest.raises(Refusal, match="no configuration can be simulated"):
        search(run, profile_of(run, forward=1e-2), hosts=2, log=said.append)
    assert any("too little memory" in line for line in said)


def test_a_run_that_fails_in_the_simulation_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, failures = Monitor.begin, [NotFinite("the loss is not finite")]

    def begun(monitor: Monitor, learner: Any) -> None:
        if failures:
            raise failures.pop()
        begin(monitor, learner)

    monkeypatch.setattr(Monitor, "begin", begun)
    run, said = recipe("cartpole-a2c"), list[str]()
    profile = profile_of(run, forward=1e-2)
    one = Candidate("", run, 0.0, "", "", predict(run, profile))
    found = [whole.strategy.name for _, whole, _ in on_hosts([one], run, profile, 2, said.append)]
    assert found == ["local-sgd", "gala"]
    assert any("left out: all-reduce" in line and "the loss is not finite" in line for line in said)


@pytest.mark.parametrize("member", [1, 2])
def test_a_signal_stops_the_plan_and_not_only_what_is_simulated(
    member: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any update, and when a member has begun."""
    begin, begun = Monitor.begin, list[Any]()

    def interrupted(monitor: Monitor, learner: Any) -> None:
        begun.append(learner)
        if len(begun) == member:
            signal.raise_signal(signal.SIGINT)
        begin(monitor, learner)

    monkeypatch.setattr(Monitor, "begin", interrupted)
    run = recipe("cartpole-a2c")
    with pytest.raises(KeyboardInterrupt):
        hosted(run, profile_of(run, forward=1e-2))
    assert len(begun) <= 2


@pytest.mark.usefixtures("one_simulated")
def test_hosts_share_no_memory() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy("hogwild")())
    said = list[str]()
    found = search(run, profile_of(run, cores=1, forward=1e-2), hosts=2, log=said.append)
    assert found
    assert all(each.run.strategy.name != "hogwild" for each in found)
    assert any("hogwild, as it needs shared memory" in line for line in said)


@pytest.mark.usefixtures("one_simulated")
def test_what_needs_shared_memory_takes_no_place_of_what_hosts_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where Hogwild is the fastest on one host, others are still tried on several."""
    monkeypatch.setattr("murmurate.mapping.hosts._batch_seconds", lambda run, cluster: 2e-2)
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy("hogwild")(), replicas=2)
    profile = profile_of(run, forward=1e-2)
    profile.exchange[exchange_key(run.strategy, 2)] = flat(1e-6)
    assert search(run, profile)[0].run.strategy == run.strategy
    found = search(run, profile, hosts=2)
    assert all(each.run.strategy.name != "hogwild" for each in found)


@pytest.mark.usefixtures("one_simulated")
def test_each_named_strategy_is_tried_on_several_hosts() -> None:
    run = recipe("cartpole-a2c")
    strategies = named_strategies(run, "elastic:5,push-gossip")
    found = search(run, profile_of(run, cores=1, forward=1e-2), hosts=2, strategies=strategies)
    assert {each.run.strategy.name for each in found} == {"all-reduce", "elastic", "push-gossip"}


def test_a_compression_is_of_strategies_that_send_something_compressed() -> None:
    """The others were named in commands that are refused."""
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy("gala")(), compression="int8")
    assert {each.strategy.name for each in candidates(run, 2) if each.replicas > 1} == {"gala"}
    assert hosted(run, profile_of(run, forward=1e-2)).keys() == {"gala"}
