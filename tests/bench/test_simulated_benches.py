"""The benches on simulated clusters, at sizes of no use but for testing; HSA2C's bounds."""

import dataclasses
import json

import pytest

from murmurate.bench import chaos_simulated, hsa2c_scaling, replicator_scaling, straggler_simulated
from murmurate.bench._result import progress_log
from murmurate.bench._simulated import MessageCost, scaled_network
from murmurate.bench.hsa2c_scaling import (
    ThreadCosts,
    equation_57_row,
    first_reaching,
    hsa2c,
    points_per_second,
)
from murmurate.errors import Refusal
from murmurate.simulation.bounds import total_bounds

QUIET = progress_log()


def test_bounds_are_those_printed():
    assert total_bounds(T=10, Tc=2.0, M=3, nw=1, STT=0.0) == (20.0, 60.0)  # the communication alone
    assert total_bounds(T=10, Tc=2.0, M=3, nw=4, STT=12.0) == (24.0, 63.0)


@pytest.mark.parametrize("wrong", [{"T": 0}, {"M": 0}, {"nw": 0}, {"Tc": -1.0}, {"STT": -1.0}])
def test_bounds_of_nonsense_are_refused(wrong):
    with pytest.raises(ValueError, match="at least"):
        total_bounds(**{"T": 1, "Tc": 1.0, "M": 1, "nw": 1, "STT": 1.0, **wrong})


COSTS = ThreadCosts(step_seconds=0.004, handling_seconds=1e-4, points=5, parameters=500_000)
PLAN = hsa2c_scaling.HSA2CPlan(steps=12, network="latency=1e-4,bandwidth=5e8")


@pytest.mark.parametrize("nodes", [3, 8])  # of one node both bounds are the simulated time itself
def test_the_simulated_time_lies_within_equation_57(nodes):
    row = equation_57_row(nodes, COSTS, PLAN)
    assert row["update_no_longer_than_exchange"]  # 2 MB each way take 8 ms
    assert row["least_seconds"] * (1 - 1e-3) <= row["simulated_seconds"]
    assert row["simulated_seconds"] <= row["most_seconds"] * (1 + 1e-3)


def test_local_updates_relieve_the_master():
    """Fig. 5: at B = 1 more nodes bring nothing once the master's port is full; a larger B does."""
    speed = {
        (nodes, B): points_per_second(hsa2c(1, B, nodes), nodes, COSTS, PLAN)
        for nodes, B in ((4, 1), (12, 1), (12, 6))
    }
    assert speed[12, 1] < 1.3 * speed[4, 1]
    assert speed[12, 6] > 2 * speed[12, 1]


def test_the_first_time_at_a_score():
    curve = [(1.0, 5.0), (2.0, 9.0), (3.0, 7.0), (4.0, 12.0)]
    assert [first_reaching(curve, r) for r in (5.0, 9.0, 10.0, 13.0)] == [1.0, 2.0, 4.0, None]


def test_the_straggler_bench_tells_the_two_kinds_apart():
    plan = straggler_simulated.SimulatedStragglerPlan(
        replicas=(3, 6), steps=8, learning_replicas=3, learning_steps=4, strategies=("gala", "all-reduce")
    )
    result = straggler_simulated.measure(plan, QUIET)
    json.dumps(result)
    assert result["asynchronous_least_kept"] > 0.9
    assert result["synchronous_least_kept"] < 0.5


def test_the_straggler_bench_names_steps_that_it_takes(monkeypatch):
    monkeypatch.setattr(straggler_simulated, "strategies", dict)
    plan = straggler_simulated.SimulatedStragglerPlan(steps=30, times=1.1)
    with pytest.raises(Refusal, match=r"is 30, no multiple of --times. Use --steps 33\."):
        straggler_simulated.measure(plan, QUIET)
    straggler_simulated.measure(dataclasses.replace(plan, steps=33), QUIET)


def test_the_chaos_bench_counts_what_is_lost():
    plan = chaos_simulated.SimulatedChaosPlan(
        replicas=6,
        minutes=20 / 60,
        fault_seconds=0.8,
        restart_seconds=1.0,
        pause_seconds=1.0,
        cut_seconds=0.5,
        measured_updates=3,
        exchange_rounds=2,
        strategies=("gala",),
    )
    row = chaos_simulated.throughput_kept("gala", [0.1], 500_000, MessageCost(1e-4, 2e-4), plan)
    # every 2.4 s a crash and a pause each take 1 s of one of six: 14%, give or take the draws
    assert row["faults"]["died"] > 2
    assert 0.75 < row["kept"] < 0.97


@pytest.mark.parametrize("bench", [chaos_simulated, replicator_scaling, straggler_simulated])
@pytest.mark.parametrize(
    ("change", "error"),
    [({"strategies": ("gala", "gosip")}, "gosip"), ({"network": "latency"}, "--network latency: .*For ex")],
)
def test_unknown_strategies_and_networks_are_refused_before_anything_is_measured(bench, change, error):
    with pytest.raises(Refusal, match=error):
        bench.measure(dataclasses.replace(bench.QUICK, **change), lambda line: pytest.fail(line))


def test_messages_of_a_small_net_take_as_long_as_those_of_the_real_one():
    network = scaled_network("latency=1e-4,bandwidth=1e9,ports=no", 0.25, 2e-5)
    assert network == "latency=1e-4,bandwidth=250000000.0,ports=no,handling=2e-05"
    assert scaled_network("handling=1e-3", 0.25, 2e-5) == "handling=1e-3"
    with pytest.raises(Refusal, match="--network bandwidth: "):
        scaled_network("bandwidth", 0.25, 2e-5)
