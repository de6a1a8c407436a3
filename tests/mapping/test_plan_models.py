"""Plans of runs that learn a model: what the source and the learner tell, what a pilot times by itself, and
what a configuration then takes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmurate.agents._dynamics import ModelConfig, short_epochs
from murmurate.cli.main import main
from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.mapping import pilot, timers
from murmurate.mapping.assumed import assumption
from murmurate.mapping.cost import predict
from murmurate.mapping.lines import Line
from murmurate.mapping.pilot import pilot_run
from murmurate.mapping.primitives import OF_MODEL, PRIMITIVES, edges, shape_of
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, exchange_key, key, load, save
from murmurate.mapping.search import search
from murmurate.recipes import recipe
from murmurate.strategies import strategy
from murmurate.training.preflight import resolved
from murmurate.training.run import Run

MILLISECOND = 1e-3
# a small model and policy, for pilots that are really run
SMALL = (
    *("--agent.model.members", "2", "--agent.model.elites", "1", "--agent.model.layers", "1"),
    *("--agent.model.hidden", "8", "--agent.model.batch", "16", "--agent.policy.batch", "16"),
    *("--agent.policy.hidden", "8", "--learning-starts", "64", "--rollouts.starts", "64"),
    *("--updates-per-step", "4"),
)


def line(a: float) -> Line:
    return Line(a, 0.0, (a, 0.0), (a, 0.0), (1, 1024))


def profile_of(run: Run, cores: int = 4, **seconds: float) -> DeviceProfile:
    """In which every primitive that is not given costs nothing."""
    costs = RecipeCosts(
        {name: line(seconds.get(name, 0.0)) for name in PRIMITIVES},
        dict.fromkeys(PRIMITIVES, 1.0),
        0.0,
        1_000,
    )
    return DeviceProfile(cores, recipes={key(run): costs})


def test_a_source_tells_how_many_transitions_a_fit_has() -> None:
    run = change(recipe("hopper-mbpo"), ["--env-steps", "25000"], "")  # the first 5,000 are random
    source: Any = run.source
    assert source.mean_transitions(run) == pytest.approx(15_000)
    assert source.mean_transitions(dataclasses.replace(run, replicas=2)) == pytest.approx(8_750)
    assert source.mean_transitions(dataclasses.replace(run, env_steps=None)) == 5_000
    # half of the fits are to fewer than the 15,000 that are kept
    kept = dataclasses.replace(source, capacity=15_000)
    assert kept.mean_transitions(run) == pytest.approx((10_000 + 15_000) / 2)
    assert dataclasses.replace(source, capacity=1_000).mean_transitions(run) == 1_000


def test_a_source_tells_how_long_its_rollouts_are() -> None:
    words = ["--env-steps", "25000", "--rollouts.length-end", "3"]
    run = change(recipe("hopper-mbpo"), [*words, "--rollouts.grows-after", "0"], "")
    source: Any = run.source
    # they grow over 150,000 env steps, of which 20,000 are made: the length is rounded down to one
    assert source.mean_length(run) == 1
    soon = dataclasses.replace(source, rollouts=dataclasses.replace(source.rollouts, grows_until=10_000))
    assert soon.mean_length(run) == pytest.approx(0.25 * 1 + 0.25 * 2 + 0.5 * 3, rel=0.02)
    assert soon.mean_length(dataclasses.replace(run, env_steps=None)) == 1


@pytest.mark.parametrize("transitions", [40, 1_000, 3_000, 20_000, 100_000])
def test_the_assumed_fit_improves_for_as_long_as_it_then_does_not(transitions: int) -> None:
    config = ModelConfig(patience=3)
    held_out = min(transitions // 5, 5_000)
    steps = max(1, (transitions - held_out) // 256)
    assert config.fit_steps(transitions) == 2 * 3 * short_epochs(steps) * steps
    assert short_epochs(steps) == max(1, math.ceil(20 / steps))


def test_fits_and_rollouts_are_paid_by_the_batches_between_them() -> None:
    run = change(recipe("hopper-mbpo"), ["--env-steps", "25000", "--rollouts.length-end", "1"], "")
    shape = shape_of(run)
    assert shape is not None
    assert shape.env_steps == pytest.approx(1 / 20)
    # 12,000 of 15,000 transitions are 46 steps an epoch; 250 env steps are 5,000 batches
    assert shape.fit_steps == pytest.approx(10 * 46 / 5_000)
    assert shape.rollout_steps == pytest.approx(1 / 5_000)
    profile = profile_of(run, forward=5 * MILLISECOND, fit=20 * MILLISECOND, imagine=1.0)
    found = predict(run, profile)
    assert found.seconds["fit"] == pytest.approx(460 * 20 * MILLISECOND / 5_000)
    assert found.seconds["imagine"] == pytest.approx(1 / 5_000)
    batch = 5 * MILLISECOND + (460 * 20 * MILLISECOND + 1) / 5_000
    assert found.env_steps_per_second == pytest.approx(1 / (20 * batch))


def test_replicas_have_fewer_transitions_to_fit_and_exchange_each_gradient_step_of_a_fit() -> None:
    run = change(recipe("hopper-mbpo"), ["--env-steps", "40000", "--replicas", "2"], "")
    profile = profile_of(run, forward=5 * MILLISECOND, fit=20 * MILLISECOND)
    costs = profile.recipes[key(run)]
    costs.vectors, costs.vectors_within = [(1_000, 2.0)], {"fit": [(9_000, 1.0)]}
    measured = Line(MILLISECOND, 1e-6, (0.0, 0.0), (1.0, 1.0), (1, 9_000))
    profile.exchange[exchange_key(run.strategy, 2)] = measured
    found = predict(run, profile)
    # between 5,000 and 20,000 transitions, 10,000 of 12,500 to learn from: 39 steps an epoch
    steps = 10 * 39 / 5_000
    assert found.seconds["fit"] == pytest.approx(steps * 20 * MILLISECOND)
    assert found.seconds["exchange"] == pytest.approx(
        2 * measured.seconds(1_000) + steps * measured.seconds(9_000)
    )


class Moving:
    """A learner's replica, whose clock is set by a test."""

    def __init__(self, size: int) -> None:
        self.clock, self.size = 0, size

    def __len__(self) -> int:
        return self.size


class Learner:
    def __init__(self) -> None:
        self.replicas = {"policy": Moving(5), "model": Moving(50)}


def test_what_is_timed_apart_is_no_part_of_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    clock, learner = timers.Clock(), Learner()

    def taking(amount: float) -> Callable[[], None]:
        def work() -> None:
            seconds[0] += amount

        return work

    step = clock.timed("step", taking(3.0))

    def fit(gradient_steps: int, ends: bool) -> bool:
        for _ in range(gradient_steps):
            step()  # of the model, and not of the agent's update
            learner.replicas["model"].clock += 1
        return ends

    fits = clock.apart("fit", fit, learner)  # type: ignore[arg-type]

    def collect() -> None:
        fits(4, True)
        fits(1, False)  # interrupted
        taking(2.0)()

    clock.timed("next", collect)()
    clock.timed("learn", step)()
    found = timers.primitives_of(clock.taken(), total=21.0)
    assert (found["collect"], found["update"], found["total"]) == (2.0, 3.0, 6.0)
    assert found["loop"] == 1.0
    assert [(call.seconds, call.updates) for call in clock.calls["fit"]] == [
        (12.0, {"policy": 0, "model": 4})
    ]


def test_a_fit_counts_as_often_as_it_has_gradient_steps_and_the_first_call_is_warm_up() -> None:
    sizes = {"policy": 5, "model": 50}
    calls = [
        timers.Call(seconds, {"policy": 0, "model": steps}, sizes)
        for seconds, steps in ((99.0, 1), (8.0, 4), (12.0, 4))
    ]
    fits = timers.ModelCalls.of("fit", calls)
    assert (fits.seconds, fits.vectors) == ([2.0, 3.0], [(50, 1.0)])
    rounds = timers.ModelCalls.of("imagine", calls)
    assert (rounds.seconds, rounds.vectors) == ([8.0, 12.0], [(50, 4.0)])
    assert timers.ModelCalls.of("imagine", calls[:1]).seconds == [99.0]


@pytest.mark.parametrize("algorithm", ["mbpo", "memr"])
def test_a_pilot_times_fits_and_rollouts_by_themselves(algorithm: str) -> None:
    run = change(recipe(f"inverted-pendulum-{algorithm}"), [*SMALL], "")
    found = pilot.measure(pilot_run(run), 0.1)
    assert all(min(found.seconds[name]) > 0 for name in ("act", "simulate", "insert", "gather", "forward"))
    assert all(min(found.seconds[name]) > 0 for name in OF_MODEL)
    parameters, updates = zip(*found.vectors, strict=True)
    assert updates[:3] == (1.0, 1.0, 1.0)  # of policy, critics and temperature
    assert not any(updates[3:]), "the model makes none of its updates in a batch"
    assert found.vectors_within["fit"] == [(parameters[3], 1.0)]
    # MEMR's rollout policy passes once over the 64 states of a round
    of_rounds = [] if algorithm == "mbpo" else [(parameters[4], 4.0)]
    assert found.vectors_within["imagine"] == of_rounds


def test_a_pilot_does_not_count_the_env_steps_before_the_first_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = change(recipe("inverted-pendulum-mbpo"), [*SMALL], "")  # one env step for four batches
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # counts timed calls
    monkeypatch.setattr(pilot, "prepare_process", lambda threads: None)  # settings of this whole process
    fabric: Any = SimpleNamespace(rank=0)
    found = pilot._timed(fabric, resolved(pilot_run(run)), 0.1, str(tmp_path))
    # the first batch follows 64 steps
    assert len({iteration["simulate"] for iteration in found.iterations}) == 1


def test_a_pilot_fits_often_and_for_a_short_time() -> None:
    run: Any = pilot_run(recipe("hopper-mbpo"))
    source = run.source
    assert (source.fit_batches, source.rollout_batches, source.learning_starts) == (16, 16, 2_000)
    assert (source.rollouts.length_end, source.rollouts.starts) == (1, 100_000)
    assert source.batches_at_once(run) == 8
    assert run.learner.model.patience == 1
    rare: Any = pilot_run(change(recipe("hopper-mbpo"), ["--updates-per-step", "0.1"], "")).source
    assert (rare.fit_batches, rare.updates_per_step) == (16, 0.1)


def test_the_costs_depend_on_how_the_model_is_rolled_out() -> None:
    run = recipe("hopper-memr")
    options = (("--rollouts.starts", "500"), ("--real-share", "0.1"), ("--rollouts.alpha", "0"))
    keys = {key(run), *(key(change(run, words, "")) for words in options)}
    assert len(keys) == 4
    assert key(change(run, ["--fit-every", "99"], "")) == key(run)


def test_an_older_profile_knows_no_models(tmp_path: Path) -> None:
    run = recipe("cartpole-a2c")
    profile = profile_of(run, forward=10 * MILLISECOND)
    profile.recipes[key(run)].vectors_within = {"fit": [(5, 1.0)]}
    save(profile, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile
    stored = json.loads((tmp_path / "p.json").read_text())
    costs = stored["recipes"][key(run)]
    del costs["vectors_within"]
    for name in OF_MODEL:
        del costs["lines"][name], costs["busy"][name]
    (tmp_path / "p.json").write_text(json.dumps(stored))
    assert predict(run, load(tmp_path / "p.json")) == predict(run, profile)


def test_a_plan_says_what_it_assumes() -> None:
    run = change(recipe("hopper-mbpo"), ["--env-steps", "25000", "--rollouts.length-end", "1"], "")
    assert assumption(run) == (
        "assumed for each fit of the model: 15,000 transitions (the mean over the run) and 460 gradient "
        "steps; for each rollout: 1 steps"
    )
    unplanned = assumption(dataclasses.replace(run, env_steps=None, minutes=1.0))
    assert unplanned is not None
    assert "5,000 transitions (at the first fit)" in unplanned
    assert assumption(recipe("cartpole-dqn")) is None


def test_candidates_of_a_model_are_searched_and_drawn() -> None:
    run = recipe("hopper-mbpo")
    profile = profile_of(run, cores=2, act=MILLISECOND, forward=5 * MILLISECOND, fit=20 * MILLISECOND)
    for name in ("all-reduce", "local-sgd", "gala"):
        profile.exchange[exchange_key(strategy(name)(), 2)] = line(MILLISECOND)
    found = search(run, profile)
    names = {candidate.name for candidate in found}
    assert "as the recipe is" in names
    assert "--simulators 2" in names
    assert any("--replicas 2" in name for name in names)
    traffic = {(edge.start, edge.end): edge.bytes for edge in edges(run, 1_000)}
    assert {("insert", "fit"), ("fit", "imagine")} <= traffic.keys()
    # 100,000 transitions a step of a round; 5.075 steps, the mean, in 5,000 batches
    row = 2 * 11 * 4 + 3 * 4 + 2 * 4
    assert traffic["imagine", "gather"] == pytest.approx(row * 100_000 * 5.075 / 5_000, rel=0.02)


def test_a_model_that_does_not_tell_how_long_its_fits_are_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("murmurate.agents._model_based.PlannedFits.fit_steps")
    run = recipe("hopper-mbpo")
    assert shape_of(run) is None
    with pytest.raises(Refusal, match="learns from model, whose costs are not modelled"):
        pilot_run(run)


@pytest.mark.parametrize("words", [["--check"], ["--hosts", "2"]])
def test_a_run_of_seconds_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "hopper-mbpo", *words]) == 2
    message = capsys.readouterr().err
    assert "fits its model every 250 env steps" in message
    assert words[0] in message
    assert "measuring" not in message
