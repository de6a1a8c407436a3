"""Pilots are short runs of one process, and a second measurement keeps what it does not replace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmurate.cli.options import change
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.fork_server import workers_on_one_core
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.launch.together import run_together
from murmurate.mapping import check, exchange, measure, pilot, rounds
from murmurate.mapping.learning import Learning
from murmurate.mapping.lines import Line
from murmurate.mapping.pilot import Pilot, pilot_run, steady
from murmurate.mapping.primitives import PRIMITIVES, edges, shape_of
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, exchange_key, key
from murmurate.recipes import recipe
from murmurate.spec import Placement
from murmurate.strategies import strategies, strategy
from murmurate.training.run import Run

SILENT = print


def test_a_pilot_learns_early_in_one_process_without_a_double_buffer() -> None:
    run = recipe("cartpole-dqn")
    source: Any = run.source
    replay = dataclasses.replace(source.replay, learning_starts=50_000)
    run = dataclasses.replace(run, source=dataclasses.replace(source, actors=2, replay=replay))
    found: Any = pilot_run(run).source
    assert found.replay.learning_starts == steady(run).source.replay.learning_starts == 2_000  # type: ignore[attr-defined]
    assert (found.actors, found.random_env_steps) == (0, 0)
    buffered = dataclasses.replace(run, source=dataclasses.replace(source, double_buffer=True))
    assert not any(each.source.double_buffer for each in pilot.sizes(buffered))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("segments", "batches"), [("1", {256, 64, 512}), ("2", {256, 64})])
def test_pilots_draw_no_batch_that_their_replay_cannot_give(segments: str, batches: set[int]) -> None:
    """One of 1,024 rows was never drawn from 512, and failed after minutes."""
    words = ["--replay.capacity", "512", "--learning-starts", "300", "--agent.batch", "256"]
    run = change(recipe("cartpole-dqn"), [*words, "--replay.segments", segments], "")
    learners: list[Any] = []
    for each in pilot.sizes(run):
        each.validate()
        learners.append(each.learner)
    assert {learner.batch for learner in learners} == batches


def test_pilots_at_once_have_a_replay_in_files_each(tmp_path: Path) -> None:
    """On the disk of the run's own, which they leave as it was; the second of two in one folder failed."""
    words = [
        "--replay.folder",
        str(tmp_path / "disk"),
        "--replay.capacity",
        "2000",
        "--learning-starts",
        "100",
    ]
    first = pilot.sizes(change(recipe("cartpole-dqn"), words, ""))[0]
    assert len(pilot.measure(first, 0.05, busy=2).iteration) > 1
    assert not any((tmp_path / "disk").iterdir())


def test_a_pilot_of_batch_mode_collects_and_draws_in_short_turns() -> None:
    run = pilot_run(recipe("cartpole-arm"))  # 125 steps of 8 simulators for 250 minibatches of 5 steps
    source: Any = run.source
    assert (source.steps, source.minibatches) == (10, 20)
    found = pilot.measure(run, 0.1)
    assert len(found.iteration) > 1
    assert all(min(found.seconds[name]) > 0 for name in ("act", "simulate", "insert", "gather", "forward"))


@pytest.mark.parametrize("minibatches", [1, 3, 18, 20, 250, 4000])
def test_short_turns_have_the_proportion_of_the_run(minibatches: int) -> None:
    run = change(recipe("cartpole-arm"), ["--minibatches", str(minibatches)], "")
    shapes = [shape_of(each) for each in (run, steady(run))]
    whole, short = (shape.env_steps for shape in shapes if shape is not None)
    assert short == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(
    ("name", "remedy"), [("cartpole-a2c", "shorter rollouts"), ("cartpole-arm", "fewer --minibatches")]
)
def test_a_pilot_that_is_too_slow_is_refused_by_the_process_that_plans(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a Refusal of the pilot's own process arrives as a failure with a traceback
    monkeypatch.setattr(pilot, "_timed", slow)
    with pytest.raises(Refusal, match=remedy):
        pilot.measure(pilot_run(recipe(name)), 0.1)


def slow(*_: Any) -> pilot._Timing:
    return pilot._Timing([], [], {}, None)


def test_a_pilot_of_fits_acts_between_its_batches() -> None:
    run = recipe("cartpole-fqi")  # 512 env steps in a row, then 64 batches
    found = pilot.measure(pilot_run(run), 0.1)
    assert all(min(found.seconds[name]) > 0 for name in ("act", "simulate", "insert", "gather"))
    assert steady(run).learner.target_every == 64, "as often as once a fit"  # type: ignore[attr-defined]


def test_a_pilot_reads_documents(tmp_path: Path) -> None:
    documents = ["a plan of many words", "words in a corpus", "many documents make a corpus of words"]
    (tmp_path / "few.txt").write_text("\n".join(20 * documents) + "\n")
    run = change(recipe("corpus-lda"), ["--world.path", str(tmp_path / "few.txt"), "--agent.batch", "8"], "")
    found = pilot.measure(pilot_run(run), 0.1)
    assert all(min(found.seconds[name]) > 0 for name in ("collect", "forward"))
    reading = next(edge for edge in edges(run, measure.parameters(run)) if edge.start == "collect")
    assert 8 * 4 * 2 < reading.bytes < 8 * 16 * 7  # ids and counts of up to 7 words each, and an offset


def test_a_pilot_counts_the_updates_of_each_vector() -> None:
    run = recipe("cartpole-trpo")  # a batch is an update of the policy, and several of the value net
    learner: Any = dataclasses.replace(run.learner, value_epochs=2, value_minibatches=3, steps=16)  # type: ignore[call-arg]
    source: Any = dataclasses.replace(run.source, simulators=2)  # type: ignore[call-arg]
    run = pilot_run(dataclasses.replace(run, learner=learner, source=source))
    found = pilot.measure(run, 0.2)
    assert [updates for _, updates in found.vectors] == [1.0, 6.0]
    assert found.step_deviation is not None
    assert found.step_deviation > 0


def test_deviations_are_those_between_steps_at_one_place_in_their_batches() -> None:
    places = [(5.0, 1.0), (2.0, 0.25), (2.0, 0.5)]  # mean and deviation of the seconds before each step
    draws, now, steps = np.random.default_rng(0), 0.0, []
    for _ in range(2000):
        steps.append([now := now + draws.normal(*place) for place in places])
    found = pilot._step_deviation(steps)
    assert found == pytest.approx(1.75, rel=0.05), "and not that of 5 s from 2 s"
    apart = [batch for whole in steps for batch in (whole, [])]
    assert pilot._step_deviation(apart) is None, "no step before them"
    assert pilot._step_deviation([[]] * 100) is None


@pytest.mark.parametrize(
    ("times", "fastest", "warned"),
    [([1.0, 1.1], 1.0, False), ([1.5, 1.0, 1.1], 1.0, False), ([2.0, 1.6, 1.3, 1.0], 1.0, True)],
)
def test_a_pilot_is_measured_until_two_rounds_agree(
    times: list[float], fastest: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first pilot is disturbed."""
    run = recipe("cartpole-a2c")
    first, left = pilot_run(run), [1e-2 * seconds for seconds in times]

    def found(each: Run, seconds: float, processes: int) -> Pilot:
        return counted(left.pop(0) if (each, processes) == (first, 1) else 1e-2)

    monkeypatch.setattr(rounds, "measure", found)
    said: list[str] = []
    [(_, measured)] = rounds.in_rounds({"it": run}, run, 2, said.append)
    assert not left
    assert measured.sizes[0].fastest.iteration[0] == pytest.approx(1e-2 * fastest)
    assert len(said) == len(times) + 2 * (len(measured.pilots) - 1)
    measure.add_costs(DeviceProfile(2), measured, "it", said.append)
    assert any("1 of 5 pilots took different times in all rounds" in line for line in said) == warned


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(strategies().keys() - {"solo"}))
def test_the_exchange_of_every_strategy_can_be_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SIZES", (1_000, 10_000))
    line = exchange.measure(strategy(name)(), 2)
    assert line.sizes == (1_000, 10_000)
    assert line.seconds(10_000) > 0


@pytest.mark.parametrize(("period", "calls"), [(1, 100), (7, 105), (300, 300)])
def test_an_exchange_is_timed_over_whole_periods(
    period: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []
    monkeypatch.setattr(exchange, "_seconds", lambda function, count: timed.append(count) or 1e-3)
    local = strategy("local-sgd")(period=period)
    SimulatedFabric(1, seed=0).run(
        [lambda fabric: exchange._at_replicas(fabric, local, 1, 10, exchange._extra_seconds)]
    )
    assert {*timed} == {calls}


def counted(seconds: float) -> Pilot:
    return Pilot(8, 64, dict.fromkeys(PRIMITIVES, [1e-3] * 4), [seconds] * 4, 1e-3)


def test_measured_again_a_profile_has_a_new_date_and_keeps_what_was_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [Line(a, 0.0, (a, 0.0), (a, 0.0), (1, 9)) for a in (1.0, 2.0)]
    monkeypatch.setattr(rounds, "measure", lambda *_: counted(1e-2))
    monkeypatch.setattr(exchange, "measure", lambda *_: lines.pop(0))
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=2)
    profile, kept = DeviceProfile(1, date="long ago"), list[str]()
    assert measure.add_variants(profile, run, SILENT)
    costs = profile.recipes[key(run)]
    costs.learning = Learning(300.0, 1e5, {}, 2)
    assert measure.add_exchange(profile, run, SILENT)
    assert not measure.add_exchange(profile, run, SILENT)
    assert not measure.add_variants(profile, run, SILENT)
    profile.date = "long ago"
    assert measure.add_variants(profile, run, SILENT, True, lambda: kept.append(profile.date))
    assert profile.recipes[key(run)].learning is costs.learning
    assert kept
    assert "long ago" not in kept
    assert profile.recipes[key(run)] is not costs
    assert measure.add_exchange(profile, run, SILENT, again=True)
    assert [line.a for line in profile.exchange.values()] == [2.0]


def test_handovers_are_measured_on_two_cores_and_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = recipe("cartpole-dqn")  # with 2 simulators a batch takes four steps, each of which is a record
    forward, act = (Line(a, 0.0, (a, 0.0), (a, 0.0), (1, 9)) for a in (6e-3, 1e-3))
    lines = dict.fromkeys(PRIMITIVES, Line(0.0, 0.0, (0.0, 0.0), (0.0, 0.0), (1, 9)))
    costs = RecipeCosts(lines | {"forward": forward, "act": act}, dict.fromkeys(PRIMITIVES, 1.0), 0.0, 99)
    profile, asked, cores = DeviceProfile(2, recipes={key(run): costs}), list[Run](), [2]

    def measured(actor_run: Run, seconds: float) -> float:
        asked.append(actor_run)
        milliseconds = {2: 7.0, 1: 12.0}[cores[0]] + len(asked) % 2  # of a batch: the second run is faster
        return 8 / (1e-3 * milliseconds)

    @contextlib.contextmanager
    def one_core() -> Iterator[None]:
        cores[0] = 1
        yield
        cores[0] = 2

    monkeypatch.setattr(measure, "measured", measured)
    monkeypatch.setattr(measure, "workers_on_one_core", one_core)
    assert measure._handovers(profile, run, SILENT) == (
        pytest.approx((7e-3 - 6e-3) / 4),
        pytest.approx((12e-3 - (6e-3 + 4 * 1e-3)) / 4),
    )
    assert {(each.source.actors, each.source.simulators, each.replicas) for each in asked} == {(1, 2, 1)}  # type: ignore[attr-defined]
    threads = dataclasses.replace(run, placement=Placement(threads=2))
    assert measure._handovers(profile, threads, SILENT) == (0.0, None), "several threads have a core each"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_workers_can_be_put_on_one_core() -> None:
    with workers_on_one_core():
        [alone] = run_together(1, cores_of_a_worker)
    assert len(alone) == 1
    assert run_together(1, cores_of_a_worker) == [os.sched_getaffinity(0)]


def cores_of_a_worker(_: object) -> set[int]:
    return os.sched_getaffinity(0)


def test_an_exchange_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Line:
        raise RunFailed("member 1 failed: Traceback\nOSError: Too many open files")

    run = dataclasses.replace(recipe("cartpole-gala"), replicas=2)
    profile, said = DeviceProfile(2), list[str]()
    profile.exchange[exchange_key(run.strategy, 2)] = Line(1.0, 0.0, (0.0, 0.0), (0.0, 0.0), (0, 0))
    monkeypatch.setattr(exchange, "measure", failing)
    assert measure.add_exchange(profile, run, said.append, again=True)
    assert profile.exchange == {}, "that of an earlier measurement"
    assert said == ["left out: the exchange of gala among 2: OSError: Too many open files"]


def test_the_costs_of_images_depend_on_how_they_are_changed() -> None:
    run = recipe("fashion-resnet20")
    source: Any = run.source
    changed = dataclasses.replace(source, augment=dataclasses.replace(source.augment, brightness=0.4))
    assert key(dataclasses.replace(run, source=changed)) != key(run)


def test_replicas_with_parts_are_not_modelled() -> None:
    with pytest.raises(Refusal, match="leave out --parts"):
        pilot_run(dataclasses.replace(recipe("fashion-resnet20"), parts=(2, 1)))


def test_a_measured_run_neither_evaluates_nor_saves_nor_logs_elsewhere() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), evaluate_every_env_steps=5_000, loggers=("wandb",))
    run = steady(dataclasses.replace(run, checkpoint_every_seconds=1.0))
    assert (run.evaluate_every_env_steps, run.loggers) == (0, ())
    assert (run.checkpoint_every_env_steps, run.checkpoint_every_seconds) == (10**12, None)


def test_a_rate_of_nothing_is_no_measurement() -> None:
    """It would be divided by."""
    lines = [{"updates": 9, "time_seconds": float(i), "env_steps": 10 * i} for i in range(9)]
    assert check.throughput(lines, 1) == pytest.approx(10.0)
    for few in (lines[:3], [line | {"env_steps": 80} for line in lines]):
        with pytest.raises(RunFailed, match="too slow to measure"):
            check.throughput(few, 1)
