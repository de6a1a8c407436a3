"""``murmurate simulate``: the same learners and strategies on a cluster that is not there."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import sys

import numpy as np
import psutil
import pytest
import torch

from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.record import groups
from murmurate.record.reader import read_metrics
from murmurate.record.report import report
from murmurate.record.runs import open_run
from murmurate.record.timelines import timeline
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import Simulation, simulate
from murmurate.sources.trajectory_source import TrajectorySourceConfig
from murmurate.strategies import strategies, strategy
from murmurate.strategies.dpsgd.master import Master
from short_runs import altered, refused

STEP = 0.01
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


def run_of(name="gala", replicas=5, updates=20, seed=0, steps=8, **changes):
    base = recipe("cartpole-gala")
    base = dataclasses.replace(base, learner=dataclasses.replace(base.learner, steps=steps))
    return altered(
        base,
        strategy=strategy(name)(),
        replicas=replicas,
        simulators=1,
        updates=updates,
        env_steps=None,
        seed=seed,
        eval_episodes=1,
        **changes,
    )


def result(folder, run, cluster=None):
    summary = simulate(run, cluster or Cluster(), folder, quiet=True).summary
    assert summary["exit"] == "finished"
    return summary


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


def test_many_replicas_write_few_lines_and_few_write_their_own(tmp_path):
    result(tmp_path / "many", run_of(replicas=20, updates=10, steps=2), Cluster(lines=5))
    lines = [r for r in read_metrics(tmp_path / "many" / "metrics.jsonl") if "kind" not in r]
    assert 5 <= len(lines) <= 7
    assert {r["replica"] for r in lines} == {0}
    assert {r["joined_replicas"] for r in lines} == {20}
    assert lines[-1]["env_steps"] == lines[-1]["total_env_steps"] == 20 * 10 * 2
    crashing = Cluster(lines=20, crash_every_seconds=0.02, restart_after_seconds=0.01)
    summary = result(tmp_path / "crashing", run_of(replicas=20, updates=15, steps=2), crashing)
    assert summary["faults"]["died"] > 5
    lines = [r for r in read_metrics(tmp_path / "crashing" / "metrics.jsonl") if "kind" not in r]
    for name in ("waiting_seconds", "computing_seconds", "bytes_exchanged"):  # also where one has died
        counts = [line[name] for line in lines]
        assert counts == sorted(counts)
    result(tmp_path / "few", run_of(replicas=3, updates=10), Cluster(lines=5))
    lines = [r for r in read_metrics(tmp_path / "few" / "metrics.jsonl") if r.get("kind") != "event"]
    assert {r["replica"] for r in lines} == {0, 1, 2}
    assert "joined_replicas" not in lines[0]


def test_a_joint_record_has_what_any_replica_has_measured(tmp_path):
    """Replica 0 is slow: it has not updated its policy yet when the others have."""
    base = recipe("pendulum-td3")
    replay = dataclasses.replace(base.source.replay, capacity=100, learning_starts=4, samples_per_insert=8.0)
    source = dataclasses.replace(base.source, replay=replay, random_env_steps=0)
    learner = dataclasses.replace(base.learner, batch=8, hidden=16, precision="float32")
    run = dataclasses.replace(base, source=source, learner=learner, strategy=strategy("gala")())
    run = altered(run, replicas=17, updates=8, env_steps=None, eval_episodes=1)
    result(tmp_path, run, Cluster(compute="straggler:0.01,4", lines=8))
    lines = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "kind" not in r and r["updates"] > 2]
    assert len(lines) > 3
    assert all("policy_value" in line for line in lines)


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


def test_a_run_with_a_centre_is_a_trace_too(tmp_path):
    run = run_of("parameter-server", replicas=2, steps=2)
    first = result(tmp_path / "run", run, Cluster(compute="constant:0.02"))
    again = result(tmp_path / "again", run, Cluster(compute=f"trace:{tmp_path / 'run'}"))
    assert again["virtual_seconds"] == pytest.approx(first["virtual_seconds"], rel=0.2)


def test_a_trace_of_a_run_with_several_updates_a_batch_has_the_times_of_batches(tmp_path):
    run = altered(recipe("cartpole-ppo"), simulators=2, updates=48, env_steps=None, eval_episodes=1)
    assert run.learner.updates(1) == 16
    result(tmp_path / "run", run, Cluster(compute="constant:0.5"))
    seconds = Cluster(compute=f"trace:{tmp_path / 'run'}").compute_model().seconds
    assert seconds == pytest.approx([0.5] * len(seconds), rel=1e-3)


def test_lines_hold_for_a_run_that_only_time_limits(tmp_path):
    run = dataclasses.replace(run_of(replicas=2), updates=None, minutes=0.005)
    result(tmp_path / "run", run, Cluster(compute="constant:0.005", lines=10))
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if line.get("replica") == 1]
    assert 9 <= len(records) <= 11
    # 8 env steps in 5 ms, since the record before
    assert records[5]["env_steps_per_second"] == pytest.approx(1600, rel=0.1)


def replica_records(folder):
    return [record for record in read_metrics(folder / "metrics.jsonl") if "kind" not in record]


def test_lines_hold_where_time_ends_a_run_of_many_updates(tmp_path):
    run = dataclasses.replace(run_of(replicas=2, updates=1_000_000), minutes=0.1 / 60)
    result(tmp_path, run, Cluster(lines=5))
    assert 4 <= sum(record["replica"] == 1 for record in replica_records(tmp_path)) <= 6


def test_a_run_that_stops_at_a_return_has_a_record_of_that_moment(tmp_path):
    """Its report counts when a record first has the return, which may have fallen again in the last one."""
    run = run_of(replicas=2, updates=2000, stop_at_return=15.0)
    simulate(run, Cluster(lines=2), tmp_path, quiet=True)
    recorded = open_run(tmp_path)
    (stop,) = [event for event in recorded.events if event["event"] == "stopping"]
    assert "reached 15" in stop["message"]
    env_steps, _ = groups.reaches(recorded, 15.0)
    assert env_steps <= stop["env_steps"]


def test_no_record_is_written_twice(tmp_path):
    result(tmp_path, run_of(replicas=2, updates=5))
    found = replica_records(tmp_path)
    assert all(record["env_steps_per_second"] > 0 for record in found)
    assert sorted((r["replica"], r["updates"]) for r in found)[-1] == (1, 5)
    assert len({(r["replica"], r["time_seconds"], r["updates"]) for r in found}) == len(found)


def test_late_replicas_that_never_join_are_reported(tmp_path):
    summary = result(tmp_path, run_of(replicas=4, updates=3), Cluster(late_join=(0.5, 9.0)))
    warning = "the run ended before 2 of 2 late replicas joined"
    assert [event["message"] for event in summary["events"]] == [warning]


def test_a_trace_of_numbers_and_of_a_run(tmp_path):
    numbers = tmp_path / "numbers.txt"
    numbers.write_text("0.02 0.02\n0.02")
    summary = result(tmp_path / "run", run_of(steps=1), Cluster(compute=f"trace:{numbers}"))
    assert summary["virtual_seconds"] == pytest.approx(0.4, rel=0.01)
    again = result(tmp_path / "again", run_of(steps=1), Cluster(compute=f"trace:{tmp_path / 'run'}"))
    assert again["virtual_seconds"] == pytest.approx(0.4, rel=0.01)


def test_the_command_writes_a_folder_that_report_and_eval_read(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["simulate", "cartpole-gala", "--replicas", "3", "--simulators", "1", "--updates", "8", "--json"]
    words += ["--eval-episodes", "1", "--compute", "constant:0.02", "--out", str(folder)]
    assert main(words) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["virtual_seconds"] == pytest.approx(0.16, rel=0.01)
    stored = json.loads((folder / "run.json").read_text())
    assert stored["launcher"] == "simulated"
    assert stored["simulated"]["compute"] == "constant:0.02"
    assert report([folder], folder / "report.html").read_text().startswith("<!")
    assert main(["eval", str(folder), "--episodes", "1", "--json"]) == 0
    capsys.readouterr()
    assert "a simulated run, which cannot be resumed" in refused(capsys, "resume", folder)
    other = refused(capsys, "resume", folder, "--launcher", "local")
    assert "a simulated run, which cannot be resumed" in other
    train = ["train", "cartpole-gala", "--replicas", "3", "--out", folder, "--continue"]
    assert "a simulated run, which cannot be resumed" in refused(capsys, *train)
    assert "already holds a simulated run. Choose" in refused(
        capsys, "train", "cartpole-gala", "--out", folder
    )


@pytest.mark.parametrize(("replicas", "shown"), [(3, 3), pytest.param(20, 12, marks=pytest.mark.slow)])
def test_its_page_shows_the_waits_for_the_straggler_in_virtual_time(tmp_path, replicas, shown):
    """Alone or joined, lines say how stale all updates were, and spans what a dozen members did."""
    summary = result(
        tmp_path, run_of("all-reduce", replicas, updates=30), Cluster(compute="straggler:0.01,4")
    )
    counts = [
        record.get("staleness_counts", {})
        for record in read_metrics(tmp_path / "metrics.jsonl")
        if "kind" not in record
    ]
    assert sum(sum(one.values()) for one in counts) == summary["total_updates"]
    found = timeline(open_run(tmp_path))
    assert (len(found.members), found.left_out) == (shown, replicas - shown)
    passed = found.end_seconds - found.start_seconds
    waited = {
        name: sum(span.length for span in spans if span.kind == "wait") / passed
        for name, spans in found.members.items()
    }
    assert waited.pop("replica 0") < 0.05
    assert all(0.65 < share < 0.85 for share in waited.values())
    page = report([tmp_path], tmp_path / "report.html").read_text()
    assert "virtual time (seconds)" in page
    assert "milliseconds after" in page
    assert "wall time (" not in page


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (Cluster(compute="gamma:1"), "no model 'gamma'"),
        (Cluster(compute="gamma"), "no model 'gamma'"),
        (Cluster(compute="constant:much"), "'much' is no number.*constant:0.01"),
        (Cluster(compute="constant:"), r"takes 1 number\(s\), not 0"),
        (Cluster(compute="constant:1e300"), "at most 1e\\+09"),  # the clock would stand still
        (Cluster(compute="lognormal:0.01,1000"), "spread must be from 0 to 50"),  # OverflowError
        (Cluster(network="spread=1000"), "spread must be from 0 to 50"),
        (Cluster(network="latency="), "'' is no number"),
        (Cluster(compute="straggler:0.01,4,99"), "slows 99 replicas, and the run has"),
        (Cluster(compute="trace:/nowhere"), r"/nowhere cannot be read \(No such file"),
        (Cluster(network="trace=/dev/null"), "/dev/null holds no numbers"),
        (Cluster(compute=f"trace:{sys.executable}"), "holds no numbers. For example"),  # a binary file
        (Cluster(network="speed=1"), "no 'speed'"),
        (Cluster(network="bandwidth=0"), "above 0"),
        (Cluster(network="ports=perhaps"), "yes or no"),
        (Cluster(network="collective=star"), "ring, tree or fastest"),
        (Cluster(loss=1.0), "not a share"),
        (Cluster(crash_every_seconds=0), "crash_every_seconds is 0"),
        (Cluster(pause_every_seconds=1e-300), "pause_every_seconds is 1e-300"),  # would never end
        (Cluster(partition=(1.0, 0.5, 0.5)), "a start, an end and a share"),
        (Cluster(late_join=(1.0, 1.0)), "a share and seconds"),
    ],
)
def test_what_makes_no_sense_is_refused_with_nothing_changed(tmp_path, cluster, words):
    with pytest.raises(Refusal, match=words):
        simulate(run_of(), cluster, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loggers": ("mlflow",)}, "leave out --loggers"),
        ({"restarts": 2}, "--restart-after"),
        ({"compression": "int8"}, "leave out --compression int8"),
        ({"probe_every_updates": 5}, "leave out --probe-every-updates"),
        ({"launcher": "torchrun"}, "leave out --launcher torchrun"),
        ({"source": TrajectorySourceConfig(actors=2)}, "beside its virtual clock: use --actors 0"),
    ],
)
def test_options_without_an_effect_are_refused(tmp_path, fields, words):
    with pytest.raises(Refusal, match=words):
        simulate(dataclasses.replace(run_of(), **fields), Cluster(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_is_prepared_as_one_of_processes_is(tmp_path):
    """An environment of one's own is tried, and the strategy takes its step from the model."""
    (tmp_path / "failing_env.py").write_text(
        "import gymnasium\n"
        "class Failing(gymnasium.Wrapper):\n"
        "    def __init__(self):\n"
        "        super().__init__(gymnasium.make('CartPole-v1'))\n"
        "    def step(self, action):\n"
        "        raise KeyError('nope')\n"
    )
    with pytest.raises(Refusal, match="raised KeyError in step"):
        simulate(recipe(f"env:{tmp_path}/failing_env.py:Failing-a2c"), Cluster(), tmp_path / "env")
    assert not (tmp_path / "env").exists()

    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(100, 2)))
    words = ["simulate", "table-gmm", "--world.path", str(tmp_path / "rows.npy"), "--agent.batch", "10"]
    words += ["--agent.step-rule", "paper", "--strategy", "dpsgd", "--agent.rate", "0.2", "--updates", "2"]
    assert main([*words, "--replicas", "2", "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["strategy"]["global_learning_rate"] == 0.2


def test_a_wrong_option_names_the_nearest(capsys):
    words = ["simulate", "cartpole-gala", "--crash-every-second", "3"]
    assert "Did you mean --crash-every-seconds?" in refused(capsys, *words)


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
