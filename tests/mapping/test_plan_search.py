"""The search on costs that are written down: which candidates stand on one host."""

from __future__ import annotations

import dataclasses
import locale
from pathlib import Path
from types import SimpleNamespace

import pytest
from written_costs import flat, profile_of, with_source

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
from murmurate.mapping.learning import Learning, learned_by
from murmurate.mapping.page import write_page
from murmurate.mapping.profile import exchange_key, key
from murmurate.mapping.search import search
from murmurate.mapping.variants import in_precision
from murmurate.native.cores import usable_cores
from murmurate.recipes import recipe
from murmurate.strategies import strategy
from murmurate.training.run import Run


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


def test_the_time_to_a_target_is_explained_by_env_steps_and_throughput(tmp_path: Path) -> None:
    """Twice the simulators make batches twice as large at the same cost, and need 4 times the env steps."""
    run = recipe("cartpole-a2c")
    profile = profile_of(run, forward=1e-2)
    learning = Learning(300.0, 1e5, {"simulators": 2.0, "replicas": 2.0}, 8, of=learned_by(run))
    profile.recipes[key(run)].learning = learning
    found = search(run, profile, "time")
    own = found[0]
    [twice] = [each for each in found if each.changes == ["--simulators", "16"]]
    assert own.run == run
    assert own.why.startswith("best of those predicted, in 100,000 env steps: ")
    assert twice.why.startswith(
        "2.00 times worse: 4.00 times the env steps, with 2.00 times the throughput: the learner limits it"
    )
    assert [each.plain()["env_steps_to_target"] for each in (own, twice)] == [1e5, 4e5]
    page = write_page(tmp_path / "plan.html", run, profile, found, {}).read_text()
    assert "Throughput against env steps to the target" in page
    assert {each.env_steps for each in search(run, profile)} == {None}


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
