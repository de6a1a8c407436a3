"""The image benches on simulated clusters, at sizes of no use but for testing."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from murmurate.bench import _resumable, _simulated, _simulated_images, jin_imagenet, replicator_scaling
from murmurate.bench._jin_figure import TrainingCurve
from murmurate.bench._result import progress_log
from murmurate.bench._simulated_images import GlooRate, NetCosts
from murmurate.cli.main import main
from murmurate.errors import Refusal, RunFailed
from murmurate.ranges import check_ranges
from pictures import write_fashion

QUIET = progress_log()


def test_weak_scaling_is_that_of_the_network_and_computed_once(tmp_path, monkeypatch):
    """Two members send their vectors once each way: a step is 0.1 s of computing and 0.1 s of sending."""
    costs = NetCosts((0.1,), 25_000_000)
    monkeypatch.setattr(_simulated_images, "net_costs", lambda *_: costs)
    monkeypatch.setattr(_simulated_images, "gloo_rate", lambda *_: GlooRate(0.0, 1e9))
    plan = replicator_scaling.ScalingPlan(
        batch=4, members=(1, 2), steps=10, strategies=("all-reduce",), where=str(tmp_path)
    )
    result = replicator_scaling.measure(plan, QUIET)
    rows = result["rows"]
    assert rows[0]["speed_up"] == 1
    assert rows[1]["update_seconds"] == pytest.approx(0.2, rel=0.01)
    assert rows[1]["efficiency"] == pytest.approx(0.5, rel=0.01)
    assert (tmp_path / "scaling.png").stat().st_size > 5_000
    for name in ("net_costs", "gloo_rate"):
        monkeypatch.setattr(_simulated_images, name, lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(replicator_scaling, "update_seconds", lambda *_: pytest.fail("simulated again"))
    assert replicator_scaling.measure(plan, QUIET) == result


def test_steps_that_take_no_time_are_refused():
    with pytest.raises(Refusal, match="slower"):
        check_ranges(replicator_scaling.ScalingPlan(slower=0.0))


def test_jins_comparison_is_computed_once(tmp_path, monkeypatch):
    # in place of a process, which would import torch anew and start one for each member
    monkeypatch.setattr(_resumable, "murmurate", lambda words, _: main([*words, "--launcher", "inline"]))
    path = write_fashion(tmp_path, train=63)
    plan = jin_imagenet.JinImagesPlan(
        path=path,
        width=1,
        passes=2,
        members=(2,),
        batches=(4,),
        methods=("all-reduce", "pull-gossip"),
        seeds=1,
        validation=0.2,
        costs_of="resnet20",
        costs_side=8,
        measured_steps=1,
        real_members=(2,),
        points=4,
        where=str(tmp_path / "runs"),
    )
    result = jin_imagenet.measure(plan, QUIET)
    json.dumps(result)
    assert [row["method"] for row in result["rows"]] == ["all-reduce", "pull-gossip"]
    assert [sentence[:12] for sentence in result["verdict"]] == ["2 members: g", "2 processes:"]
    assert [row["method"] for row in result["real"]] == ["all-reduce", "pull-gossip"]
    curve, _ = jin_imagenet.real(plan, 2, "pull-gossip", QUIET) or pytest.fail("it diverged")
    for name, end in (("seconds", result["real"][1]["seconds"]), ("passes", 2)):
        values = [point[name] for point in curve.points]
        assert len(values) >= 2  # how many depends on the time, as a run is recorded once a second
        assert values == sorted(values)
        assert values[-1] == pytest.approx(end, rel=0.1)
    assert (tmp_path / "runs" / "curves.png").stat().st_size > 5_000
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*.json")}
    assert jin_imagenet.measure(plan, QUIET)["rows"] == result["rows"]
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*.json")} == before


def test_the_verdict_compares_while_all_steps_are_large():
    """Six passes: a gossip of a second each takes smaller steps from 2 s on, all-reduce from 6 s on."""

    def curve(method, pass_seconds, losses, end):
        points = [
            {"seconds": pass_seconds * k, "passes": k, "loss": loss, "accuracy": 0}
            for k, loss in enumerate([*losses, end])
        ]
        return TrainingCurve(method, 8, 0, points)

    curves = [
        curve("all-reduce", 3, [3, 2.5, 2.4, 0.9, 0.8, 0.7], 0.5),
        curve("pull-gossip", 1, [3, 2.9, 2.8, 1.2, 1.1, 1.0], 0.8),
    ]
    rows = [jin_imagenet.row(8, method, curves) for method in ("all-reduce", "pull-gossip")]
    assert [row["early_loss"] for row in rows] == [3, 2.8]  # at 2 s; at 6 s gossip has 0.8
    (sentence,) = jin_imagenet.verdict(rows)
    assert "gossip leads" in sentence
    slower = [curves[1], curve("all-reduce", 1.5, [3, 2.5, 2.4, 0.9, 0.8, 0.7], 0.5)]
    rows = [jin_imagenet.row(8, method, slower) for method in ("all-reduce", "pull-gossip")]
    assert [row["early_loss"] for row in rows] == [2.5, 2.8]  # at 3 s gossip has 1.2
    (sentence,) = jin_imagenet.verdict(rows)
    assert "gossip does not lead" in sentence
    assert "all-reduce ends lowest" in sentence


def test_the_verdict_says_which_gossip_leads_if_the_other_does_not():
    """As with 32 members in the result of 2026-12-01."""
    early = {"all-reduce": 0.9, "push-gossip": 1.0, "pull-gossip": 0.8}
    rows = [
        {"members": 32, "method": method, "early_loss": loss, "test_loss": 0.5}
        for method, loss in early.items()
    ]
    (sentence,) = jin_imagenet.verdict(rows)
    assert sentence.startswith("32 members: pull-gossip leads while")
    rows[1]["early_loss"] = 0.85
    (sentence,) = jin_imagenet.verdict(rows)
    assert sentence.startswith("32 members: gossip leads while")


def test_a_simulated_run_that_diverges_leaves_the_others_their_table(tmp_path, monkeypatch):
    """A full plan simulates 60 runs with large steps: one that diverges must not end the bench."""
    exits = {
        "all-reduce": "failed: the loss of replica 'classifier' is nan at its update 2.",
        "elastic": "finished",
    }
    costs = NetCosts((0.1,), 1_000)
    monkeypatch.setattr(_simulated_images, "net_costs", lambda *_: costs)

    record = {"replica": 0, "time_seconds": 1.0, "total_env_steps": 4, "validation_loss": 2, "accuracy": 0.1}
    monkeypatch.setattr(_simulated, "read_metrics", lambda _: [record])
    monkeypatch.setattr(jin_imagenet, "draw", lambda *_: None)

    def simulate(run, cluster, folder, quiet):
        end = {"virtual_seconds": 2.0, "env_steps": 8, "test_loss": 1.5, "accuracy": 0.2}
        return SimpleNamespace(summary={"exit": exits[run.strategy.name], **end})

    monkeypatch.setattr(_simulated, "simulate", simulate)
    plan = jin_imagenet.JinImagesPlan(
        path=write_fashion(tmp_path, train=63), width=1, passes=1, members=(2,), batches=(4,), seeds=2,
        methods=("all-reduce", "elastic"), real_members=(), where=str(tmp_path / "runs"),
    )  # fmt: skip
    result = jin_imagenet.measure(plan, QUIET)
    assert [(row["seeds"], row["test_loss"]) for row in result["rows"]] == [(0, None), (2, 1.5)]
    assert result["verdict"] == ["2 members: all-reduce diverged with every seed"]
    monkeypatch.setattr(_simulated, "simulate", lambda *_, **__: pytest.fail("simulated again"))
    assert jin_imagenet.measure(plan, QUIET)["rows"] == result["rows"]
    exits["elastic"] = "failed: [Errno 28] No space left on device"
    monkeypatch.setattr(_simulated, "simulate", simulate)
    with pytest.raises(RunFailed, match=r"elastic with 2 replicas.*No space"):
        jin_imagenet.measure(replace(plan, seeds=3), QUIET)
    with pytest.raises(RunFailed, match="smaller --learning-rate"):
        jin_imagenet.measure(replace(plan, methods=("all-reduce",)), QUIET)


def test_a_method_that_there_is_not_is_refused():
    with pytest.raises(Refusal, match="pull-gossip"):
        jin_imagenet.check(jin_imagenet.JinImagesPlan(methods=("pul-gossip",)))


def test_batches_that_do_not_match_the_members_are_refused():
    plan = jin_imagenet.JinImagesPlan(members=(8,))
    with pytest.raises(Refusal, match="5 batches for 1 numbers of members"):
        jin_imagenet.check(plan)
