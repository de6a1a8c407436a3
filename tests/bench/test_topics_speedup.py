"""DPSVI's speed-up at sizes of no use but for testing: what is measured, kept and told."""

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest

from murmurate.bench import _topic_costs, _topic_real, topics_speedup
from murmurate.bench._result import progress_log
from murmurate.bench._topic_costs import DPSVICosts, fitted
from murmurate.bench._topic_plan import SpeedupPlan
from murmurate.bench._topic_real import spreads, times
from murmurate.bench._topic_runs import (
    EvaluationSchedule,
    PerplexityPoint,
    evaluations,
    reached,
    validation,
)
from murmurate.bench.topics_speedup import SpeedupCase, cluster, dpsvi
from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.strategies.solo import Solo

QUIET = progress_log()
COSTS = DPSVICosts(0.004, 0.0, 0.05, 1e-4, 1e-9, {})


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return SpeedupPlan(
        documents=600,
        vocabulary=600,
        topics=5,
        mean_length=40,
        kept=60,
        workers=(1, 3),
        workers_local_updates=(1,),
        threads=(1, 3),
        both=(2,),
        local_updates=(2,),
        largest=(3, 2),
        target_documents=1_500,
        most=4_000,
        sparse_documents=2_000,
        sparse_looks=4,
        sparse_local_updates=(2,),
        widths=((600, 40.0),),
        width_local_updates=(1, 3),
        real_documents=0,
        measured_updates=10,
        pushes=3,
        where=str(tmp_path_factory.mktemp("speedup")),
    )


@pytest.fixture(scope="module")
def world(plan):
    return topics_speedup._world(plan.vocabulary, plan.mean_length, plan.documents, plan)


def seen(plan, world, case, documents=3_000, dense=False, cost=COSTS):
    run = dpsvi(plan, world, case)
    schedule = EvaluationSchedule(validation(world), first=500, factor=1, most=documents)
    return evaluations(run, cluster(cost.step_seconds, cost, plan), schedule, dense=dense)


def test_a_perplexity_is_reached_at_the_first_look_at_it():
    looks = [
        PerplexityPoint(100, 1.0, 90.0),
        PerplexityPoint(200, 3.0, 80.0),
        PerplexityPoint(300, 4.0, 85.0),
    ]
    assert reached(looks, 85.0) is looks[1]
    assert reached(looks, 95.0) is looks[0]
    assert reached(looks, 79.0) is None


def test_nobody_looks_twice_at_what_the_master_has_not_changed(plan, world):
    run = dpsvi(plan, world, SpeedupCase("", "average", 2, 1, 5, 4))
    schedule = EvaluationSchedule(validation(world), first=64, factor=1.01, most=10_000, folded=True)
    found = evaluations(run, cluster(COSTS.step_seconds, COSTS, plan), schedule)
    folds = [one.folds for one in found]
    assert len(folds) > 5
    assert folds == sorted(set(folds))
    for one in found:  # four pushes of five mini-batches of 64
        assert one.documents >= one.folds * 4 * 5 * 64


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([(100, 5.0), (200, 7.0), (400, 11.0)], (1.5, 0.02)),
        ([(100, 1.0), (200, 2.0), (400, 4.1)], (0.0, 0.0101904)),  # faster than in proportion
        ([(100, 5.0), (200, 4.0)], (2.25, 0.0)),
        ([(100, 5.0)], (2.5, 0.0)),
    ],
)
def test_the_cost_of_a_message_is_fitted(measured, expected):
    assert fitted(measured) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_of_a_node_work_side_by_side(plan, world, threads):
    (*_, last) = seen(plan, world, SpeedupCase("", "average", 1, threads, 50, 1))
    assert last.documents / last.seconds == pytest.approx(threads * 64 / 0.004, rel=0.1)


def test_the_master_is_what_workers_queue_for(plan, world):
    """A message that takes its core as long as a mini-batch: more workers bring nothing at B = 1."""
    slow = dataclasses.replace(COSTS, message_seconds=0.004)
    speed = {}
    for workers, B in ((2, 1), (8, 1), (8, 20)):
        (*_, last) = seen(plan, world, SpeedupCase("", "paper", workers, 1, B, 8), 12_000, cost=slow)
        speed[workers, B] = last.documents / last.seconds
    assert speed[8, 1] < 1.3 * speed[2, 1]
    assert speed[8, 20] > 3 * speed[8, 1]


def test_sparse_pushes_are_dense_ones_where_steps_are_short(plan, world):
    case = SpeedupCase("", "average", 4, 1, 3, 4)
    sparse, dense = (seen(plan, world, case, dense=dense) for dense in (False, True))
    assert [one.documents for one in sparse] == [one.documents for one in dense]
    for few, many in zip(sparse, dense, strict=True):
        assert few.perplexity == pytest.approx(many.perplexity, rel=0.002)
    assert sparse[-1].perplexity != dense[-1].perplexity


def test_the_bench_tells_all_and_keeps_what_it_has(plan):
    result = topics_speedup.measure(plan, QUIET)
    json.dumps(result)
    assert result["rules"]["paper"]["serial"]["step"] == pytest.approx(0.01)
    for rule in result["rules"].values():
        assert {case["panel"] for case in rule["cases"]} == {"workers", "threads", "both", "largest"}
        assert rule["serial"]["reached"] is not None
        for case in rule["cases"]:
            assert (case["tsp_serial"] is None) == (case["documents"] is None)
    (pushes,) = result["sparse"]["perplexity"]  # of one rate and one B
    assert len(pushes["dense"]) == plan.sparse_looks
    assert pushes["most_apart"] < 1e-5 < pushes["present_most_apart"]
    one, three = (result["sparse"]["push_bytes"]["600"][B] for B in ("1", "3"))
    assert one["sparse_bytes"] < three["sparse_bytes"] < three["dense_bytes"]
    told = []
    again = topics_speedup.measure(plan, told.append)
    assert again == result
    assert [line for line in told if "bytes" not in line] == []


def test_speed_ups_are_over_the_first_of_a_panel(plan, world, monkeypatch):
    """Where each case takes as many seconds as it has replicas left to a hundred."""

    def evaluations(run, cluster, schedule, *, dense=False):
        return [PerplexityPoint(1000, 100.0 - run.replicas, 1.0, 7)]

    monkeypatch.setattr(topics_speedup, "evaluations", evaluations)
    wide = dataclasses.replace(plan, both=(2, 3), where=str(Path(plan.where) / "others"))
    Path(wide.where).mkdir()
    svi = topics_speedup.run_of(world, topics_speedup.svi_model(wide), Solo(), 1)
    rows = topics_speedup._rule("average", world, svi, COSTS, wide, QUIET)["cases"]
    told = {(row["panel"], row["workers"], row["threads"]): row["speedup"] for row in rows}
    assert told == pytest.approx(
        {
            ("workers", 1, 1): 1.0,
            ("workers", 3, 1): 99 / 97,
            ("threads", 1, 1): 1.0,
            ("threads", 1, 3): 99 / 97,
            ("both", 2, 2): 4.0,
            ("both", 3, 3): 4 * 96 / 91,
            ("largest", 3, 2): 99 / 94,  # over one node of one thread
        }
    )
    assert {row["folds"] for row in rows} == {7}


def test_a_target_after_fewer_documents_than_usual_before_the_first_look_is_looked_at(plan, world, tmp_path):
    early = dataclasses.replace(
        plan, target_documents=300, workers=(1,), threads=(), both=(), largest=None, where=str(tmp_path)
    )
    svi = topics_speedup.run_of(world, topics_speedup.svi_model(early), Solo(), 1)
    serial = topics_speedup._rule("average", world, svi, COSTS, early, QUIET)["serial"]
    assert serial["reached"]["documents"] == 320  # whole mini-batches


def test_times_are_at_the_perplexity_that_serial_comes_to():
    found = {
        "serial": {"documents_per_second": 10.0, "points": [(100, 90.0), (200, 80.0), (300, 70.0)]},
        "1 node": {"documents_per_second": 5.0, "points": [(100, 90.0), (150, 79.0)]},
        "2 threads": {"documents_per_second": 20.0, "points": [(100, 95.0), (160, 80.0)]},
        "2 workers": {"documents_per_second": 7.0, "points": [(100, 95.0), (900, 80.5)]},
    }
    told = times(found, 150)
    assert told["target_perplexity"] == 80.0
    assert told["seconds"] == {"serial": 20.0, "1 node": 30.0, "2 threads": 8.0, "2 workers": None}
    assert told["tsp_serial"] == pytest.approx({"1 node": 2 / 3, "2 threads": 2.5, "2 workers": None})
    assert told["speedup"] == {"2 threads": 3.75, "2 workers": None}
    assert told["speed_over_one_node"] == {"2 threads": 4.0, "2 workers": 1.4}


def test_spreads_are_over_the_seeds_that_reached_the_target():
    def seed(speed, tsp):
        return {
            "documents_per_second": {"2 threads": speed},
            "speed_over_one_node": {"2 threads": speed},
            "tsp_serial": {"2 threads": tsp},
            "speedup": {"2 threads": None},
        }

    told = spreads([seed(1.0, 2.0), seed(3.0, None), seed(2.0, 4.0)])
    assert told["documents_per_second"]["2 threads"]["median"] == 2.0
    assert told["tsp_serial"]["2 threads"]["median"] == 3.0
    assert told["tsp_serial"]["2 threads"]["repetitions"] == 2
    assert told["speedup"] == {"2 threads": None}


def test_a_master_is_not_charged_for_waiting():
    class Slow:
        """Mail comes at the fourth look."""

        looks, traffic = 0, "its own"

        def receive(self, tag):
            self.looks += 1
            end = time.process_time() + 0.02
            while time.process_time() < end:
                pass
            return tag if self.looks == 4 else None

    patient = _topic_costs._WaitMeter(Slow())
    assert patient.traffic == "its own"
    before = time.process_time()
    assert patient.wait("update", 60.0) == "update"
    spent = time.process_time() - before
    assert 0.06 <= patient.waited <= spent - 0.02  # three looks in vain; the fourth is work
    assert _topic_costs._WaitMeter(Slow()).wait("update", 0.0) is None


@pytest.mark.slow
def test_real_threads_learn(plan, world, tmp_path):
    small = dataclasses.replace(plan, real_documents=12_800, real_seeds=1, where=str(tmp_path))
    told = _topic_real.real(small, world, QUIET)
    (seed,) = told["seeds"]
    assert set(seed["seconds"]) == {"serial", "1 node", "2 threads", "2 workers"}
    assert all(speed > 0 for speed in seed["documents_per_second"].values())
    assert seed["seconds"]["serial"] > 0
    assert set(told["speed_over_one_node"]) == {"2 threads", "2 workers"}


def test_the_spread_of_two_steps_is_not_extrapolated(monkeypatch):
    monkeypatch.setattr(_topic_costs, "step_seconds", lambda run, updates, clock: [1.0, 10.0])
    monkeypatch.setattr(
        _topic_costs, "push_cost", lambda run, pushes: {"bytes": 8.0, "master_cpu_seconds": 2.0}
    )
    found = _topic_costs.costs(None, None, {1: None}, updates=2, pushes=1, log=QUIET)
    assert found.step_seconds == 5.5
    assert found.step_spread == pytest.approx(math.log(7.75 / 3.25) / 1.349)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--real-documents", "10000"], r"--real-target 5000. Use --real-documents 11280, or 0\."),
        (["--real-target", "20000"], r"may end before the target, --real-target 20000. Use .* 41280"),
        (["--network", "bandwith=1e9"], "there is no 'bandwith'"),
    ],
)
def test_plans_that_would_fail_later_are_refused_at_once(words, error):
    changed = change(SpeedupPlan(), words, "bench")
    with pytest.raises(Refusal, match=error):
        topics_speedup.measure(changed, pytest.fail)


def test_real_processes_can_be_left_out():
    assert change(SpeedupPlan(), ["--real-documents", "0"], "bench").real_documents == 0
