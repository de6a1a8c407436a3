"""``murmurate simulate``: the same learners and strategies on a cluster that is not there."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import signal
import weakref

import psutil
import pytest
import torch
from short_simulations import STEP, result, run_of

from murmurate.simulation.cluster import Cluster
from murmurate.simulation.monitor import Monitor
from murmurate.simulation.start import Simulation, simulate
from murmurate.strategies import strategies
from murmurate.strategies.dpsgd.master import Master

HOSTILE = Cluster(
    compute="lognormal:0.01,0.3",
    network="latency=1e-3,bandwidth=1e8,spread=0.3,handling=1e-5,resend=0.005",
    loss=0.02,
    crash_every_seconds=0.08,
    restart_after_seconds=0.03,
    pause_every_seconds=0.2,
    pause_seconds=0.03,
    cut_every_seconds=0.2,
    cut_seconds=0.03,
    partition=(0.05, 0.08, 0.5),
    late_join=(0.2, 0.04),
)


def timeless(summary):
    return {k: v for k, v in summary.items() if k not in ("wall_seconds", "env_steps_per_second")}


def test_a_partition_of_almost_all_leaves_one_on_the_other_side(tmp_path):
    run = run_of("all-reduce", replicas=3, updates=4)
    summary = result(tmp_path / "run", run, Cluster(partition=(0.02, 1.0, 0.9)))

    assert summary["virtual_seconds"] > 1.0  # the next mean waits until the links are back
    (event,) = [event for event in summary["events"] if event["event"] == "partition"]
    assert event["message"].startswith("2 replicas are cut off")


AGREEING = sorted(set(strategies()) - {"solo"})


@pytest.mark.parametrize("name", AGREEING)
def test_every_strategy_gets_through_every_fault_and_twice_the_same(tmp_path, name):
    both = []
    for attempt in "ab":
        summary = result(tmp_path / attempt, run_of(name, seed=3, steps=3), HOSTILE)
        both.append((timeless(summary), (tmp_path / attempt / "metrics.jsonl").read_text()))
    assert both[0] == both[1]
    assert both[0][0]["updates"] >= 20
    assert sum(both[0][0]["faults"].values()) > 0


@pytest.mark.parametrize("name", AGREEING)
def test_without_faults_a_step_takes_its_seconds_and_all_learn_together(tmp_path, name):
    summary = result(tmp_path / "run", run_of(name, replicas=3, steps=3))
    assert summary["virtual_seconds"] == pytest.approx(20 * STEP, rel=0.12)
    assert summary["faults"] == {}
    assert summary["disagreement_final"] < 0.5
    assert name == "hogwild" or summary["bytes_exchanged"] > 0
    shares = [summary[f"share_{what}"] for what in ("computing", "waiting", "exchanging", "idle")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    assert shares[0] > 0.85


_DROPS = """
from torch import nn

class Drops(nn.Sequential):
    out_features = 8

    def __init__(self, spec, hidden):
        super().__init__(nn.Linear(spec.observation_shape[0], 8), nn.Dropout(0.5))
"""


def test_the_masks_of_dropout_depend_on_the_seed_alone(tmp_path):
    net = tmp_path / "drops.py"
    net.write_text(_DROPS)
    run = run_of(replicas=2, updates=5)
    run = dataclasses.replace(run, learner=dataclasses.replace(run.learner, torso=f"{net}:Drops"))
    both = []
    for attempt in (1, 2):
        torch.manual_seed(attempt)
        state = torch.get_rng_state()
        both.append(timeless(result(tmp_path / str(attempt), run)))
        assert torch.equal(torch.get_rng_state(), state), "the caller's numbers go on"
    assert both[0] == both[1]


def test_another_seed_is_another_run(tmp_path):
    one, other = (timeless(result(tmp_path / str(seed), run_of(seed=seed))) for seed in (0, 1))
    assert one["train_return_mean"] != other["train_return_mean"]


def test_a_straggler_delays_only_strategies_with_common_rounds(tmp_path):
    slow = Cluster(compute="straggler:0.01,4")
    gossip = result(tmp_path / "gala", run_of("gala", minutes=0.5 / 60, updates=None, steps=1), slow)
    meeting = result(tmp_path / "mean", run_of("all-reduce", minutes=0.5 / 60, updates=None, steps=1), slow)
    # in half a virtual second: 4 x 50 + 12 updates, against 5 x 13 at the straggler's pace
    assert gossip["total_updates"] == pytest.approx(212, abs=8)
    assert meeting["total_updates"] == pytest.approx(65, abs=5)
    assert gossip["share_waiting"] < 0.01
    assert meeting["share_waiting"] == pytest.approx(0.8 * 0.75, abs=0.05)


def test_a_sleeper_is_idle_and_does_not_compute(tmp_path):
    summary = result(tmp_path / "run", run_of("gala", steps=1), Cluster(compute="sleeper:0.01,3"))
    # one of five lives 4 times as long, 3/4 of it asleep
    assert summary["share_idle"] == pytest.approx(3 / 8, abs=0.02)
    assert summary["share_computing"] == pytest.approx(5 / 8, abs=0.02)


@pytest.fixture(scope="module")
def came_back(tmp_path_factory):
    """The folder of a run in which members crash and come back, and its summary."""
    folder = tmp_path_factory.mktemp("came_back") / "run"
    cluster = Cluster(crash_every_seconds=0.1, restart_after_seconds=0.02)
    return folder, result(folder, run_of("gala", updates=60, seed=2, steps=3), cluster)


def test_a_member_that_comes_back_has_the_state_of_a_living_peer(came_back):
    _, summary = came_back
    assert summary["faults"]["joined"] >= 1
    assert summary["updates"] == 60  # of one that began anew at 0 there would be more time to learn in
    assert summary["virtual_seconds"] < 60 * STEP * 1.1
    assert summary["disagreement_final"] < 0.1


def test_a_member_that_comes_back_goes_on_counting_its_env_steps(came_back):
    folder, summary = came_back
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    counts = {}
    for line in lines:
        if line.get("kind") is None:
            assert line["env_steps"] >= counts.get(line["replica"], 0)
            counts[line["replica"]] = line["env_steps"]
    assert sum(counts.values()) == summary["env_steps"]


def test_the_simulators_of_a_crashed_member_are_closed(tmp_path):
    run = run_of("gala", replicas=2, seed=2)
    run = dataclasses.replace(run, world=dataclasses.replace(run.world, served=True))
    before = psutil.Process().children()
    summary = result(tmp_path / "run", run, Cluster(crash_every_seconds=0.1, restart_after_seconds=0.02))
    assert summary["faults"]["died"] >= 1
    assert [child for child in psutil.Process().children() if child not in before] == []


def test_a_run_of_many_crashes_keeps_no_learner_that_has_died(tmp_path, monkeypatch):
    """Each has a replay, say, so memory would grow with every crash."""
    lives, kept = [], []
    begin, close = Monitor.begin, Monitor.close

    def begun(monitor, learner):
        lives.append(weakref.ref(learner))
        begin(monitor, learner)

    def closed(monitor):
        gc.collect()
        kept.append(sum(life() is not None for life in lives))
        close(monitor)

    monkeypatch.setattr(Monitor, "begin", begun)
    monkeypatch.setattr(Monitor, "close", closed)
    cluster = Cluster(crash_every_seconds=0.05, restart_after_seconds=0.01)
    summary = result(tmp_path / "run", run_of("gala", replicas=2, updates=40, steps=1), cluster)
    assert kept == [2]
    assert len(lives) == 2 + summary["faults"]["joined"] > 2


def test_many_members_may_come_back_while_others_are_told_of_deaths(tmp_path):
    """With more than a hundred members, asking whether one is lost lets others run."""
    cluster = Cluster(compute="straggler:0.01,4", crash_every_seconds=0.001, restart_after_seconds=0.002)
    summary = result(tmp_path / "run", run_of("gala", replicas=110, updates=3, steps=1), cluster)
    assert summary["faults"]["joined"] > 10


def test_a_crashed_one_that_stays_away_is_named(tmp_path):
    summary = result(tmp_path / "run", run_of("gala", seed=1), Cluster(crash_every_seconds=0.08))
    assert summary["dead_replicas"]
    assert summary["faults"]["died"] == len(summary["dead_replicas"])
    named = [e["member"] for e in summary["events"] if e["event"] == "died"]
    assert sorted(named) == summary["dead_replicas"]


def test_a_centre_that_refuses_everything_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(Master, "is_valid", lambda self, x: False)
    summary = result(tmp_path / "run", run_of("dpsgd"))
    assert ["refused all messages" in e["message"] for e in summary["events"]] == [True]


def test_minutes_are_virtual_and_an_end_of_all_env_steps_holds(tmp_path):
    timed = result(tmp_path / "timed", run_of("all-reduce", updates=None, minutes=0.1 / 60))
    assert timed["virtual_seconds"] == pytest.approx(0.1, abs=0.03)
    counted = run_of("local-sgd", updates=None)
    counted = result(tmp_path / "counted", dataclasses.replace(counted, env_steps=800))
    assert 800 <= counted["env_steps"] <= 800 + 5 * 8 * 10  # up to the end of a round of 10 updates


@pytest.mark.parametrize("name", ["local-sgd", "synchronous-elastic"])
def test_rounds_do_not_put_off_the_last_update(name, tmp_path):
    assert result(tmp_path / "run", run_of(name, updates=14))["total_updates"] == 5 * 14


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gala", "all-reduce"])
def test_a_thousand_replicas_in_one_thread(tmp_path, name):
    summary = result(tmp_path / "run", run_of(name, replicas=1000, updates=3))
    assert summary["total_updates"] == 3000
    assert summary["disagreement_final"] < 0.5
    assert psutil.Process().num_threads() < 20


def test_sigterm_while_a_large_cluster_is_being_built_ends_it_at_once(tmp_path, monkeypatch):
    built, build = [], Simulation._learner

    def interrupted(self, member):
        built.append(member.rank)
        if len(built) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return build(self, member)

    monkeypatch.setattr(Simulation, "_learner", interrupted)
    finish = simulate(run_of(replicas=40), Cluster(), tmp_path / "run", quiet=True)
    assert len(built) == 3
    assert finish.code == 128 + signal.SIGTERM
    assert finish.summary["exit"] == "interrupted"
    assert not (tmp_path / "run" / "checkpoints" / "last").exists()


@pytest.mark.parametrize("end", [{"updates": 20}, {"env_steps": 800, "updates": None}])
def test_an_interrupt_during_the_last_evaluation_keeps_the_summary(tmp_path, monkeypatch, end):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("murmurate.simulation.result.figures", interrupted)
    finish = simulate(dataclasses.replace(run_of(), **end), Cluster(), tmp_path / "run", quiet=True)
    assert (finish.code, finish.summary["exit"]) == (128 + signal.SIGINT, "interrupted")
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").is_file()


def test_late_replicas_that_never_join_are_reported(tmp_path):
    summary = result(tmp_path, run_of(replicas=4, updates=3), Cluster(late_join=(0.5, 9.0)))
    warning = "the run ended before 2 of 2 late replicas joined"
    assert [event["message"] for event in summary["events"]] == [warning]


def test_a_replica_that_is_stopped_is_not_stopped_again(tmp_path):
    """Else short times between long pauses would add up, and no replica would ever go on."""
    cluster = Cluster(compute=f"constant:{STEP}", pause_every_seconds=0.002, pause_seconds=0.1)
    result(tmp_path / "run", run_of("gala", replicas=2, updates=3), cluster)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    begins = [(line["member"], line["time_seconds"]) for line in lines if line.get("event") == "paused"]
    assert begins
    for rank in (0, 1):
        times = [seconds for member, seconds in begins if member == rank]
        assert all(later >= earlier + 0.1 for earlier, later in itertools.pairwise(times))


def test_a_replica_that_was_killed_while_it_was_stopped_can_be_stopped_again_after_its_restart(tmp_path):
    cluster = Cluster(
        compute=f"constant:{STEP}",
        crash_every_seconds=0.05,
        restart_after_seconds=0.001,
        pause_every_seconds=0.01,
        pause_seconds=0.1,
    )
    result(tmp_path / "run", run_of("gala", replicas=3, updates=5), cluster)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    begins = [(line["member"], line["time_seconds"]) for line in lines if line.get("event") == "paused"]
    times = [[seconds for member, seconds in begins if member == rank] for rank in range(3)]
    assert any(later < earlier + 0.1 for own in times for earlier, later in itertools.pairwise(own))
