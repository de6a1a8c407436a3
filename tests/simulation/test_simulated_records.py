"""What simulated runs write: lines of records, traces, and a page in virtual time."""

from __future__ import annotations

import dataclasses
import json

import pytest
from short_simulations import result, run_of

from murmurate.cli.main import main
from murmurate.recipes import recipe
from murmurate.record import groups
from murmurate.record.reader import read_metrics
from murmurate.record.report import report
from murmurate.record.runs import open_run
from murmurate.record.timelines import timeline
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import simulate
from murmurate.strategies import strategy
from short_runs import altered, refused


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
