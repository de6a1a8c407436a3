"""The search on costs that are written down: which candidates stand, on one host and on several."""

from __future__ import annotations

import dataclasses
import locale
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.mapping import search as searching
from murmurate.mapping.candidates import (
    Candidate,
    candidates,
    changes,
    named_strategies,
    runs_with_exchange,
    strategies_of,
)
from murmurate.mapping.cost import predict
from murmurate.mapping.hosts import compute_model, on_hosts
from murmurate.mapping.learning import Learning, learned_by
from murmurate.mapping.lines import Line
from murmurate.mapping.page import write_page
from murmurate.mapping.primitives import PRIMITIVES
from murmurate.mapping.profile import DeviceProfile, Link, RecipeCosts, exchange_key, key
from murmurate.mapping.search import search
from murmurate.mapping.variants import in_precision
from murmurate.native.cores import usable_cores
from murmurate.recipes import recipe
from murmurate.replica.clipping import NotFinite
from murmurate.simulation.monitor import Monitor
from murmurate.strategies import strategy
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
            compression="bfloat16",
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


def test_a_stage_that_limits_is_told_by_its_own_work() -> None:
    """Two actors take 16 ms each for a batch, or 80 ms; the learner takes 20 ms."""
    run = with_source(recipe("cartpole-impala"), actors=2, simulators=8)  # 8 steps of each actor
    for act, limit in (
        (2e-3, "the learner limits it, mostly forward (75%) and loop (25%)"),
        (1e-2, "its 2 actors limit it, mostly act (100%)"),
    ):
        profile = profile_of(run, cores=8, act=act, forward=15e-3, loop=5e-3)
        [own] = [each for each in search(run, profile) if each.run == run]
        assert limit in own.why


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


def test_only_what_is_free_here_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = recipe("cartpole-a2c")
    profile = profile_of(run, cores=usable_cores(), forward=1e-2)
    search(run, profile)
    profile.renew()
    monkeypatch.setattr(searching, "available_bytes", lambda: 1)
    with pytest.raises(Refusal, match="no configuration of cartpole-a2c fits"):
        search(run, profile)


def test_another_machines_memory_is_the_limit_and_without_it_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This machine's memory is another question."""
    run, said = recipe("cartpole-a2c"), list[str]()
    profile = profile_of(run, forward=1e-2)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1, available=1))
    unlimited = search(run, profile, log=said.append)
    assert any("does not say how much memory its machine has" in line for line in said)
    least, most = (find(each.bytes for each in unlimited) for find in (min, max))
    profile.hardware["memory_bytes"] = least
    said.clear()
    assert {each.bytes for each in search(run, profile, log=said.append)} == {least} < {least, most}
    assert not said
    profile.hardware["memory_bytes"] = 1
    with pytest.raises(Refusal, match="no configuration of cartpole-a2c fits"):
        search(run, profile)


def test_the_least_memory_is_that_of_the_fastest_of_those_that_are_no_slower_than_the_recipe() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=2)
    profile = profile_of(run, act=1e-3, forward=1e-3)
    all_found, found = search(run, profile), search(run, profile, "memory")
    own = next(each for each in all_found if not each.changes)
    rates = {each.name: each.prediction.env_steps_per_second for each in all_found}
    assert {each.name for each in found} == {name for name in rates if rates[name] >= rates[own.name]}
    assert len(found) < len(all_found)
    assert (found[0].name, found[0].figure, found[0].unit) == ("--replicas 1 --simulators 16", "151", "MiB")
    assert "1.99 times as much memory, for 0.90 times the throughput" in next(
        each.why for each in found if each.run == run
    )
    # more simulators take some kB, which is less than is known of a run's memory
    assert [each.name for each in found[1:3]] == ["--simulators 16", "--strategy local-sgd --simulators 16"]
    profile.hardware["memory_bytes"] = own.bytes - 1
    names = {each.name for each in search(run, profile, "memory")}
    assert names - {each.name for each in found}, "where the recipe does not fit any speed will do"


def test_the_time_to_a_target_needs_what_was_learned_with_these_settings() -> None:
    run = recipe("cartpole-a2c")
    profile = profile_of(run, forward=1e-2)
    learning = Learning(300.0, 1e5, {"simulators": 0.5, "replicas": 0.5}, 8, 0, [], learned_by(run))
    profile.recipes[key(run)].learning = learning
    plain = search(run, profile, "time")
    more = dataclasses.replace(run, replicas=2)
    assert key(more) == key(run)
    with pytest.raises(Refusal, match=r"with other settings.*--profile --target 300"):
        search(more, profile, "time")
    learning.missed, learning.exponents, said = ["simulators"], {"replicas": 0.5}, list[str]()
    learning.unfinished = 2
    found = search(run, profile, "time", log=said.append)
    assert {each.run.source.simulators for each in found} == {8}  # type: ignore[attr-defined]
    assert 0 < len(found) < len(plain)
    assert "other simulators: such runs missed the target" in found[0].why
    assert "unfinished: 2 of 8 runs" in said[0]
    learning.of = ""
    with pytest.raises(Refusal, match="by an earlier version"):
        search(run, profile, "time")


def test_a_precision_is_chosen_by_its_own_costs_and_effect() -> None:
    run = recipe("hopper-td3")
    other = in_precision(run, "bfloat16")
    assert other is not None
    profile = profile_of(run, forward=5e-3)
    assert all("precision" not in each.name for each in search(run, profile))
    profile.recipes |= profile_of(other, forward=3e-3).recipes
    found = search(run, profile)
    assert "--agent.precision bfloat16" in found[0].name
    assert {each.run.learner.precision for each in found} == {"float32", "bfloat16"}  # type: ignore[attr-defined]
    exponents = {"replicas": 0.5, "batch": 0.5, "simulators": 0.5}
    learning = Learning(300.0, 1e5, exponents, 8, missed=["period", "asynchrony"], of=learned_by(run))
    profile.recipes[key(run)].learning = learning
    assert all("precision" not in each.name for each in search(run, profile, "time"))
    learning.exponents["precision"] = 0.0
    assert "--agent.precision bfloat16" in search(run, profile, "time")[0].name
    assert in_precision(recipe("pong-ppo"), "bfloat16") is None  # it leaves the choice to the device


def test_the_first_candidate_is_the_run_itself() -> None:
    run = recipe("cartpole-gala")
    assert next(candidates(run, 2)) == run


def test_shorter_periods_are_considered_where_time_is_the_objective_and_their_effect_is_known() -> None:
    run = recipe("cartpole-a2c")
    profile = profile_of(run, forward=5e-3)
    learning = Learning(300.0, 1e5, {"period": 0.5, "replicas": 0.0}, 12, of=learned_by(run))
    profile.recipes[key(run)].learning = learning
    for each in runs_with_exchange(run, 2, strategies_of(run, shorter=True)):
        milliseconds = {5: 2.0, 2: 5.0}.get(getattr(each.strategy, "period", 1), 1.0)
        profile.exchange[exchange_key(each.strategy, 2)] = flat(1e-3 * milliseconds)
    found = {each.name: each for each in search(run, profile, "time")}
    whole, half, quarter = (
        found["--strategy local-sgd" + period + " --replicas 2"]
        for period in ("", " --strategy.period 5", " --strategy.period 2")
    )
    exchange = [each.prediction.seconds["exchange"] for each in (whole, half, quarter)]
    assert exchange == pytest.approx([1e-3, 2e-3, 5e-3])
    batch = [5e-3 + seconds for seconds in exchange]
    ratios = [each.predicted / whole.predicted for each in (half, quarter)]
    assert ratios == pytest.approx([batch[1] / batch[0] * 0.5**0.5, batch[2] / batch[0] * 0.2**0.5])
    own = dataclasses.replace(run, replicas=2, strategy=strategy("local-sgd")(period=3, outer_momentum=0.5))
    assert changes(own, dataclasses.replace(own, strategy=dataclasses.replace(own.strategy, period=1))) == [
        "--strategy.period",
        "1",
    ]
    del learning.exponents["period"]
    learning.missed = ["period"]
    assert not any("period" in each.name for each in search(run, profile, "time"))
    assert not any("period" in each.name for each in search(run, profile))


def test_named_strategies_take_the_place_of_the_usual_ones() -> None:
    run = recipe("cartpole-a2c")
    strategies = named_strategies(run, "local-sgd:5,dpsgd:20,elastic, gala")
    profile = profile_of(run, forward=1e-2)
    profile.exchange.clear()
    for number, each in enumerate(runs_with_exchange(run, 2, strategies), start=1):
        profile.exchange[exchange_key(each.strategy, 2)] = flat(1e-3 * number)
    two = [each for each in search(run, profile, strategies=strategies) if each.run.replicas == 2]
    exchange = {
        " ".join(each.changes[: each.changes.index("--replicas")]): each.prediction.seconds["exchange"]
        for each in two
        if "--simulators" not in each.changes and "--double-buffer" not in each.changes
    }
    assert exchange.keys() == {
        "",  # the run's own, all-reduce
        "--strategy local-sgd --strategy.period 5",
        "--strategy dpsgd --strategy.local-updates 20",
        "--strategy elastic",
        "--strategy gala",
    }
    assert len({*exchange.values()}) == 5, "each has its own cost"
    for each in two:
        assert change(_with_strategy(run, each.changes), _own_options(each.changes), "") == each.run


def _with_strategy(run: Run, words: list[str]) -> Run:
    return dataclasses.replace(run, strategy=strategy(words[1])()) if words[0] == "--strategy" else run


def _own_options(words: list[str]) -> list[str]:
    return words[2:] if words[0] == "--strategy" else words


def test_a_named_strategy_of_the_runs_own_name_keeps_its_settings() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy("local-sgd")(outer_learning_rate=0.7))
    found = named_strategies(run, "local-sgd,local-sgd:50,local-sgd:50")
    assert found == [strategy("local-sgd")(outer_learning_rate=0.7, period=period) for period in (10, 50)]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("gala:5", "gala has no period"),
        ("dpsgd:B", "a whole number, as in dpsgd:20"),
        ("elastic:0", "period"),
        ("gal", "gala"),
        ("gala,", "list strategies"),
        ("solo", "solo trains one replica"),
    ],
)
def test_a_strategy_that_cannot_be_considered_is_refused(names: str, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        named_strategies(recipe("cartpole-a2c"), names)


@pytest.mark.usefixtures("one_simulated")
def test_each_named_strategy_is_tried_on_several_hosts() -> None:
    run = recipe("cartpole-a2c")
    strategies = named_strategies(run, "elastic:5,push-gossip")
    found = search(run, profile_of(run, cores=1, forward=1e-2), hosts=2, strategies=strategies)
    assert {each.run.strategy.name for each in found} == {"all-reduce", "elastic", "push-gossip"}


def test_the_page_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    run = recipe("cartpole-a2c")
    profile = profile_of(run, act=1e-3, simulate=1e-3, forward=1e-3)
    found = [Candidate("", run, 1.0, "env steps/s", "", predict(run, profile))]
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "POSIX")
        page = write_page(tmp_path / "plan.html", run, profile, found, {})
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert "± 0%" in page.read_text(encoding="utf-8")
