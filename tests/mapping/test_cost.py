"""The cost model, on costs that are written down: its figures can be computed by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from murmurate.mapping.cost import NotMeasured, predict
from murmurate.mapping.lines import Line
from murmurate.mapping.primitives import PRIMITIVES, edges, shape_of
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, exchange_key, key
from murmurate.recipes import recipe
from murmurate.strategies import strategy
from murmurate.training.run import Run
from pictures import write_fashion, write_folder

MILLISECOND = 1e-3
PARAMETERS = 1_000_000


def line(a: float, b: float = 0.0) -> Line:
    return Line(a, b, (a, b), (a, b), (1, 1024))


def profile_of(
    run: Run, cores: int = 4, deviation: float = 0.0, busy: float = 1.0, **lines: Line
) -> DeviceProfile:
    """In which every primitive that is not given costs nothing."""
    costs = RecipeCosts(
        {name: lines.get(name, line(0.0)) for name in PRIMITIVES},
        dict.fromkeys(PRIMITIVES, busy),
        deviation,
        PARAMETERS,
    )
    return DeviceProfile(cores, recipes={key(run): costs})


def with_source(run: Run, **fields: Any) -> Run:
    source: Any = run.source
    return dataclasses.replace(run, source=dataclasses.replace(source, **fields))


def test_a_learner_alone_does_its_work_one_after_another() -> None:
    run = recipe("cartpole-a2c")  # 8 simulators, 8 steps
    profile = profile_of(
        run, act=line(MILLISECOND), simulate=line(0, MILLISECOND / 8), forward=line(4 * MILLISECOND)
    )
    found = predict(run, profile)
    assert found.env_steps_per_second == pytest.approx(64 / ((8 + 8 + 4) * MILLISECOND))
    assert found.updates_per_second == pytest.approx(1 / (20 * MILLISECOND))
    assert found.bottleneck == "learner"


@pytest.mark.parametrize(
    ("act", "background", "hidden"),
    [(1.0, 0.0, 0.0), (1.0, 0.5, 1.0), (1.0, 1.0, 1.5), (2.0, 1.0, 2.0), (4.0, 1.0, 3.0)],
)
def test_a_double_buffer_hides_what_native_threads_step(act: float, background: float, hidden: float) -> None:
    run = with_source(recipe("cartpole-a2c"), double_buffer=True)
    profile = profile_of(
        run, act=line(act * MILLISECOND / 16), simulate=line(3 * MILLISECOND / 16), forward=line(MILLISECOND)
    )
    profile.recipes[key(run)].background = background
    seconds = (act + 3 + 1 - hidden) * MILLISECOND
    found = predict(run, profile)
    assert found.updates_per_second == pytest.approx(1 / seconds)
    assert found.busy == pytest.approx((act + 3 + 1) * MILLISECOND / seconds), "hidden work is work"


def test_a_replay_steps_as_often_as_its_ratio_allows() -> None:
    run = recipe("cartpole-dqn")  # 8 simulators, batches of 64, 8 samples per insert: a step for each batch
    shape = shape_of(run)
    assert shape is not None
    assert (shape.steps, shape.rows, shape.env_steps) == (1.0, 64, 8.0)
    twice = shape_of(with_source(run, simulators=4))
    assert twice is not None
    assert (twice.steps, twice.env_steps) == (2.0, 8.0)


def test_replicas_beyond_the_cores_share_them() -> None:
    run = recipe("cartpole-a2c")
    profile = profile_of(run, cores=2, forward=line(10 * MILLISECOND))
    for replicas in (2, 4, 8):
        many = dataclasses.replace(run, replicas=replicas)
        profile.exchange[exchange_key(many.strategy, replicas)] = line(0.0)
        found = predict(many, profile)
        assert found.env_steps_per_second == pytest.approx(2 * 64 / (10 * MILLISECOND))
        assert found.bottleneck == ("learner" if replicas == 2 else "cores")


def test_an_exchange_that_was_measured_on_shared_cores_shares_them_once() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=4)
    profile = profile_of(run, cores=2, forward=line(10 * MILLISECOND))
    profile.exchange[exchange_key(run.strategy, 4)] = line(6 * MILLISECOND)
    assert predict(run, profile).updates_per_second == pytest.approx(4 / (26 * MILLISECOND))


def test_a_centre_takes_no_core_from_the_replicas() -> None:
    """Idle it takes less than 8% of a core; what it answers is measured with the exchange."""
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=2, strategy=strategy("elastic")())
    profile = profile_of(run, cores=2, busy=1.5, forward=line(10 * MILLISECOND))
    profile.exchange[exchange_key(run.strategy, 2)] = line(3 * MILLISECOND)
    found = predict(run, profile)
    assert found.updates_per_second == pytest.approx(2 / (18 * MILLISECOND))
    assert (found.bottleneck, found.busy) == ("learner", 2)


def test_an_exchange_with_another_period_must_be_measured_itself() -> None:
    """Gossip publishes after each update, whatever its period."""
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=2, strategy=strategy("push-gossip")(period=10))
    profile = profile_of(run)
    profile.exchange[exchange_key(strategy("push-gossip")(), 2)] = line(MILLISECOND)
    with pytest.raises(NotMeasured, match="the exchange of push-gossip:10 among 2 replicas"):
        predict(run, profile)
    profile.exchange[exchange_key(run.strategy, 2)] = line(MILLISECOND / 2)
    assert predict(run, profile).seconds["exchange"] == MILLISECOND / 2


def test_the_slowest_stage_limits_a_pipeline() -> None:
    run = with_source(recipe("cartpole-impala"), actors=2, simulators=8)
    slow_learner = profile_of(run, cores=4, act=line(MILLISECOND), forward=line(20 * MILLISECOND))
    assert predict(run, slow_learner).bottleneck == "learner"
    slow_actors = profile_of(run, cores=4, act=line(10 * MILLISECOND), forward=line(MILLISECOND))
    assert predict(run, slow_actors).bottleneck == "actors"
    few_cores = profile_of(run, cores=1, act=line(MILLISECOND), forward=line(9 * MILLISECOND))
    assert predict(run, few_cores).bottleneck == "cores"


def test_shared_cores_lose_as_much_as_processes_compute_at_a_time() -> None:
    run = with_source(recipe("cartpole-dqn"), actors=1, simulators=8)
    milliseconds = {}
    for acting in (10, 2):
        profile = profile_of(run, cores=1, act=line(acting * MILLISECOND), forward=line(10 * MILLISECOND))
        profile.recipes[key(run)].crowded = 1.5
        found = predict(run, profile)
        milliseconds[acting] = 1 / found.updates_per_second / MILLISECOND
        assert (found.bottleneck, found.busy) == ("cores", pytest.approx(1.0)), "slower, and no less busy"
    # an actor that computes for a fifth of the time costs a fifth of what one that always computes does
    assert milliseconds == {10: pytest.approx(1.5 * 20), 2: pytest.approx(1.1 * 12)}


def test_each_record_of_an_actor_is_handed_over() -> None:
    run = recipe("cartpole-dqn")  # 8 env steps for each batch
    profile = profile_of(run, cores=8, act=line(MILLISECOND), forward=line(4 * MILLISECOND))
    profile.recipes[key(run)].handover_seconds = MILLISECOND
    batches = {}
    for actors, simulators in ((1, 8), (1, 1), (2, 8), (2, 2)):
        found = predict(with_source(run, actors=actors, simulators=simulators), profile)
        batches[actors, simulators] = found.bottleneck, 1 / found.updates_per_second / MILLISECOND
    assert batches == {
        (1, 8): ("learner", pytest.approx(4 + 1)),
        (1, 1): ("actors", pytest.approx(8 + 8)),  # eight steps and their records
        (2, 8): ("learner", pytest.approx(4 + 2)),
        (2, 2): ("learner", pytest.approx(4 + 8)),
    }
    run = recipe("cartpole-impala")  # trajectories of 8 steps
    profile = profile_of(run, cores=8, forward=line(4 * MILLISECOND))
    profile.recipes[key(run)].handover_seconds = MILLISECOND
    for actors in (1, 2):
        found = predict(with_source(run, actors=actors, simulators=8, trajectories=0), profile)
        assert found.seconds["handover"] == pytest.approx(actors * MILLISECOND), "a trajectory of each actor"


@pytest.mark.parametrize(("measured", "seconds"), [(None, 0.6), (0.0, 0.0), (2.5, 2.5)])
def test_a_handover_costs_something_else_where_cores_are_shared(
    measured: float | None, seconds: float
) -> None:
    run = with_source(recipe("cartpole-dqn"), actors=1, simulators=8)
    times = {}
    for cores in (1, 2):
        profile = profile_of(run, cores, act=line(4 * MILLISECOND), forward=line(4 * MILLISECOND))
        costs = profile.recipes[key(run)]
        costs.handover_seconds = MILLISECOND
        costs.shared_handover_seconds = None if measured is None else measured * MILLISECOND
        times[cores] = 1 / predict(run, profile).updates_per_second / MILLISECOND
    assert times == {1: pytest.approx(4 + 4 + seconds), 2: pytest.approx(4 + 1)}


def test_an_exchange_is_paid_in_every_update() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=2)
    profile = profile_of(run, forward=line(10 * MILLISECOND))
    with pytest.raises(NotMeasured, match="all-reduce among 2"):
        predict(run, profile)
    profile.exchange[exchange_key(run.strategy, 2)] = line(MILLISECOND, MILLISECOND / PARAMETERS)
    found = predict(run, profile)
    assert found.seconds["exchange"] == pytest.approx(2 * MILLISECOND)
    assert found.updates_per_second == pytest.approx(2 / (12 * MILLISECOND))


def test_vectors_are_exchanged_each_by_itself() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=2)
    profile = profile_of(run, forward=line(10 * MILLISECOND))
    profile.recipes[key(run)].vectors = [(PARAMETERS, 1.0), (3 * PARAMETERS, 0.5)]
    profile.exchange[exchange_key(run.strategy, 2)] = line(MILLISECOND, MILLISECOND / PARAMETERS)
    assert predict(run, profile).seconds["exchange"] == pytest.approx((2 + 4 / 2) * MILLISECOND)


def test_rounds_wait_for_the_slowest_and_rarer_rounds_less() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=4)
    profile = profile_of(run, deviation=0.5, forward=line(10 * MILLISECOND))
    waits = {}
    for name in ("all-reduce", "local-sgd", "gala"):
        many = dataclasses.replace(run, strategy=strategy(name)())
        profile.exchange[exchange_key(many.strategy, 4)] = line(0.0)
        waits[name] = predict(many, profile).seconds["waiting"]
    assert waits["all-reduce"] > waits["local-sgd"] > waits["gala"] == 0.0
    assert waits["all-reduce"] == pytest.approx(1.03 * 5 * MILLISECOND, rel=0.03)  # of four normal variables


def test_a_round_waits_half_a_time_slice_for_a_replica_whose_core_an_actor_has() -> None:
    run = dataclasses.replace(with_source(recipe("cartpole-dqn"), actors=1, simulators=8), replicas=2)
    seconds = {}
    for name in ("all-reduce", "local-sgd", "gala"):
        many = dataclasses.replace(run, strategy=strategy(name)())
        profile = profile_of(run, cores=2, forward=line(10 * MILLISECOND))
        profile.exchange[exchange_key(many.strategy, 2)] = line(0.0)
        seconds[name] = 2 / predict(many, profile).updates_per_second
    assert seconds["all-reduce"] - seconds["gala"] == pytest.approx(0.75 * MILLISECOND)
    assert seconds["local-sgd"] - seconds["gala"] == pytest.approx(0.075 * MILLISECOND), "period 10"


def test_busy_cores_are_slower() -> None:
    run = recipe("cartpole-a2c")
    profile = profile_of(run, cores=2, busy=1.5, forward=line(10 * MILLISECOND))
    two = dataclasses.replace(run, replicas=2)
    profile.exchange[exchange_key(two.strategy, 2)] = line(0.0)
    assert predict(two, profile).updates_per_second == pytest.approx(2 / (15 * MILLISECOND))
    assert predict(run, profile).updates_per_second == pytest.approx(1 / (10 * MILLISECOND))


def test_decoding_processes_are_a_stage_of_their_own(tmp_path: Path) -> None:
    run = recipe("folder-resnet18")  # batches of 32
    run = dataclasses.replace(run, world=dataclasses.replace(run.world, path=write_folder(tmp_path)))
    profile = profile_of(run, collect=line(0, MILLISECOND), forward=line(20 * MILLISECOND))
    rates = {
        workers: predict(with_source(run, workers=workers), profile).env_steps_per_second
        for workers in (0, 1, 2)
    }
    assert rates[0] == pytest.approx(32 / (52 * MILLISECOND))  # the learner decodes
    assert rates[1] == pytest.approx(32 / (32 * MILLISECOND))  # limited by the decoder
    assert rates[2] == pytest.approx(32 / (20 * MILLISECOND))
    assert ("collect", "forward") in {(edge.start, edge.end) for edge in edges(run, PARAMETERS)}


def test_images_in_memory_have_no_decoding_processes(tmp_path: Path) -> None:
    run = recipe("fashion-resnet20")
    run = dataclasses.replace(run, world=dataclasses.replace(run.world, path=write_fashion(tmp_path)))
    profile = profile_of(run, collect=line(0, MILLISECOND), forward=line(72 * MILLISECOND))
    for workers in (None, 2):
        found = predict(with_source(run, workers=workers), profile)
        assert found.env_steps_per_second == pytest.approx(128 / (200 * MILLISECOND))


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(NotMeasured, match="cartpole-dqn"):
        predict(recipe("cartpole-dqn"), profile_of(recipe("cartpole-a2c")))


def test_the_graph_of_a_replay_has_its_traffic() -> None:
    run = recipe("cartpole-dqn")
    found = {(edge.start, edge.end): edge.bytes for edge in edges(run, PARAMETERS)}
    assert found["simulate", "act"] == 8 * 4 * 4  # 8 simulators, 4 numbers of 4 bytes
    assert found["sample", "gather"] == 8 * 64
    assert found["gather", "forward"] == 64 * (2 * 16 + 8 + 8)
    assert found["backward", "update"] == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("chosen", "bytes_for_each"),
    [
        (strategy("all-reduce")(), 4 * (1 + 3)),  # a replica writes its vector, and reads all
        (strategy("local-sgd")(period=8), 4 * (1 + 3) / 8),
        (strategy("elastic")(period=40), 4 * 2 / 40),  # to the centre, and back
        (strategy("dpsgd")(threads=1), 4 * 2 / 10),
        (strategy("gala")(), 4 * 2),  # it publishes its vector, and reads that of its peer
        (strategy("hogwild")(), 0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_graph_has_what_the_strategy_exchanges(chosen: Any, bytes_for_each: float) -> None:
    run = dataclasses.replace(recipe("cartpole-ppo"), replicas=3, strategy=chosen)  # 16 updates a batch
    found = {(edge.start, edge.end): edge.bytes for edge in edges(run, PARAMETERS)}
    assert found["backward", "update"] == 16 * 4 * PARAMETERS
    # without rounds a replica may read a peer before that has published again
    assert found["update", "exchange"] == pytest.approx(16 * bytes_for_each * PARAMETERS, rel=0.05)
    two_updates = {(edge.start, edge.end): edge.bytes for edge in edges(run, PARAMETERS, 2 * PARAMETERS)}
    assert two_updates["update", "exchange"] == pytest.approx(found["update", "exchange"] / 8)


@pytest.mark.parametrize(("clip", "observations"), [(None, 2), (1.0, 6)])
def test_the_graph_of_sequences_has_the_observation_after_the_last_step(
    clip: float | None, observations: int
) -> None:
    run = recipe("cartpole-arm")  # 32 sequences of 5 steps
    run = dataclasses.replace(run, learner=dataclasses.replace(run.learner, importance_clip=clip))
    found = {(edge.start, edge.end): edge.bytes for edge in edges(run, PARAMETERS)}
    assert found["gather", "forward"] == 32 * (observations * 16 + 5 * (8 + 4 + 2))


@pytest.mark.parametrize("step_deviation", [None, 2.0])
def test_each_round_within_a_batch_waits(step_deviation: float | None) -> None:
    run = dataclasses.replace(recipe("cartpole-ppo"), replicas=4)  # 16 updates for each batch
    waits = {}
    for period in (1, 4, 16, 64):
        many = dataclasses.replace(run, strategy=strategy("local-sgd")(period=period))
        profile = profile_of(run, deviation=0.5, forward=line(10 * MILLISECOND))
        profile.recipes[key(run)].step_deviation = step_deviation
        profile.exchange[exchange_key(many.strategy, 4)] = line(0.0)
        waits[period] = predict(many, profile).seconds["waiting"]
    assert waits[64] == pytest.approx(waits[16] / 2)
    if step_deviation is None:  # profiles that do not tell rounds of a batch apart: it waits once
        assert waits[1] == waits[4] == waits[16]
    else:  # independent updates: the sum of their deviations is 4 times the deviation of their sum
        assert (waits[1], waits[4]) == pytest.approx((4 * waits[16], 2 * waits[16]))
