"""DPSVI's speed-up at sizes of no use but for testing: what is measured, kept and told."""

import dataclasses
import json

import pytest

from murmurate.bench import _topic_runs, topics_speedup
from murmurate.bench._result import teller
from murmurate.bench._topic_costs import Costs, fitted
from murmurate.bench._topic_plan import Plan
from murmurate.bench._topic_runs import Look, Looking, reached
from murmurate.bench.topics_speedup import Case, cluster, dpsvi, spreads, times
from murmurate.recipes import recipe

QUIET = teller(True)
COSTS = Costs(0.004, 0.0, 0.05, 1e-4, 1e-9, {})


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return Plan(
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
    looking = Looking(_topic_runs.validation(run), first=500, factor=1, most=documents)
    return _topic_runs.looks(run, cluster(cost.step_seconds, cost, plan), looking, dense=dense)


def test_the_time_at_a_perplexity_lies_between_two_looks():
    looks = [Look(100, 1.0, 90.0), Look(200, 3.0, 80.0), Look(300, 4.0, 85.0)]
    assert reached(looks, 85.0) == Look(150, 2.0, 85.0)
    assert reached(looks, 95.0) == looks[0]
    assert reached(looks, 79.0) is None


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
    (*_, last) = seen(plan, world, Case("", "average", 1, threads, 50, 1))
    assert last.documents / last.seconds == pytest.approx(threads * 64 / 0.004, rel=0.1)


def test_the_master_is_what_workers_queue_for(plan, world):
    """A message that takes its core as long as a mini-batch: more workers bring nothing at B = 1."""
    slow = dataclasses.replace(COSTS, message_seconds=0.004)
    speed = {}
    for workers, B in ((2, 1), (8, 1), (8, 20)):
        (*_, last) = seen(plan, world, Case("", "paper", workers, 1, B, 8), 12_000, cost=slow)
        speed[workers, B] = last.documents / last.seconds
    assert speed[8, 1] < 1.3 * speed[2, 1]
    assert speed[8, 20] > 3 * speed[8, 1]


def test_sparse_pushes_are_dense_ones_where_steps_are_short(plan, world):
    case = Case("", "average", 4, 1, 3, 4)
    sparse, dense = (seen(plan, world, case, dense=dense) for dense in (False, True))
    assert [one.documents for one in sparse] == [one.documents for one in dense]
    for few, many in zip(sparse, dense, strict=True):
        assert few.perplexity == pytest.approx(many.perplexity, rel=0.002)
    assert sparse[-1].perplexity != dense[-1].perplexity


def test_the_bench_tells_all_and_keeps_what_it_has(plan):
    result = topics_speedup.measure(False, QUIET, plan)
    json.dumps(result)
    assert result["rules"]["paper"]["serial"]["step"] == pytest.approx(0.01)
    for rule in result["rules"].values():
        assert {case["panel"] for case in rule["cases"]} == {"workers", "threads", "both", "largest"}
        assert rule["serial"]["reached"] is not None
        for case in rule["cases"]:
            assert (case["tsp_serial"] is None) == (case["documents"] is None)
    cases = result["rules"]["average"]["cases"]
    one = next(case for case in cases if case["panel"] == "threads")
    (largest,) = [case for case in cases if case["panel"] == "largest"]
    # one node of one thread never comes to the target here, so nothing can be over it
    assert (one["seconds"], largest["speedup"]) == (None, None)
    assert largest["seconds"] is not None
    for pushes in result["sparse"]["perplexity"]:
        assert len(pushes["dense"]) == plan.sparse_looks
        assert pushes["most_apart"] < 1e-5 < pushes["present_most_apart"]
    one, three = (result["sparse"]["push_bytes"]["600"][B] for B in ("1", "3"))
    assert one["sparse_bytes"] < three["sparse_bytes"] < three["dense_bytes"]
    told = []
    again = topics_speedup.measure(False, told.append, plan)
    assert again == result
    assert [line for line in told if "bytes" not in line] == []


def test_times_are_at_the_perplexity_that_all_came_to():
    found = {
        "serial": {"documents_per_second": 10.0, "points": [[100, 90.0], [200, 80.0]]},
        "1 node": {"documents_per_second": 5.0, "points": [[100, 90.0], [200, 80.0]]},
        "2 threads": {"documents_per_second": 20.0, "points": [[100, 95.0], [200, 85.0]]},
    }
    told = times(found)
    assert told["target_perplexity"] == 85.0
    assert told["seconds"] == {"serial": 15.0, "1 node": 30.0, "2 threads": 10.0}
    assert told["tsp_serial"] == {"1 node": 0.5, "2 threads": 1.5}
    assert told["speedup"] == {"2 threads": 3.0}


def test_spreads_are_over_the_seeds_that_reached_the_target():
    def seed(speed, tsp):
        return {
            "documents_per_second": {"2 threads": speed},
            "tsp_serial": {"2 threads": tsp},
            "speedup": {"2 threads": None},
        }

    told = spreads([seed(1.0, 2.0), seed(3.0, None), seed(2.0, 4.0)])
    assert told["documents_per_second"]["2 threads"]["median"] == 2.0
    assert told["tsp_serial"]["2 threads"]["median"] == 3.0
    assert told["tsp_serial"]["2 threads"]["repetitions"] == 2
    assert told["speedup"] == {"2 threads": None}


@pytest.mark.slow
def test_real_threads_learn(plan, world, tmp_path):
    small = dataclasses.replace(plan, real_documents=12_800, real_seeds=1, where=str(tmp_path))
    told = topics_speedup.real(small, world, QUIET)
    (seed,) = told["seeds"]
    assert set(seed["seconds"]) == {"serial", "1 node", "2 threads", "2 workers"}
    assert all(speed > 0 for speed in seed["documents_per_second"].values())


def test_a_run_of_something_else_has_no_documents():
    with pytest.raises(ValueError, match="no documents"):
        _topic_runs.validation(recipe("cartpole-a2c"))
