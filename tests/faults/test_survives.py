"""Replicas that are killed in the middle of a run: the others go on, and say so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from faults.commands import Written, training
from murmurate.cli.main import main
from murmurate.training import checkpoint
from waiting import until

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("strategy", "replicas", "victim"),
    [
        pytest.param("gala", 4, 2, marks=pytest.mark.slow),
        pytest.param("gala", 4, 0, marks=pytest.mark.slow),
        ("all-reduce", 3, 0),
        pytest.param("local-sgd", 3, 1, marks=pytest.mark.slow),
        pytest.param("hogwild", 3, 0, marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_when_one_is_killed(
    strategy: str, replicas: int, victim: int, tmp_path: Path
) -> None:
    options = ("--strategy", strategy, "--replicas", replicas, "--env-steps", 10**9)
    often = ("--record-every-seconds", 0.1, "--checkpoint-every-env-steps", 10_000)
    with training(tmp_path / "run", "cartpole-gala", *options, *often) as command:
        command.learning(replicas)
        assert command.shares_by_name() == []
        before = max(r["time_seconds"] for rank in range(replicas) for r in command.records(rank))
        os.kill(command.pids()[victim], signal.SIGKILL)
        survivors = [rank for rank in range(replicas) if rank != victim]
        (died,) = until(lambda: command.events("died"), "the death to be noticed")
        command.learning(survivors, records=4, after_seconds=died["time_seconds"])
        os.kill(command.process.pid, signal.SIGINT)
        assert command.wait() == 130, command.said()
        command.leaves_nothing()

        summary = command.summary()
        assert summary["dead_replicas"] == [victim]
        assert summary["exit"] == "interrupted"
        assert [e["member"] for e in summary["events"] if e["event"] == "died"] == [victim]
        (died,) = command.events("died")
        assert died["member"] == victim
        assert "SIGKILL" in died["message"]
        assert f"replica {victim} died" in command.said()

        for rank in survivors:
            assert command.records(rank)[-1]["updates"] > _updates_at(command.records(rank), before)
        # they learned of the death, and did not wait for the deadline of a member that is silent
        assert command.events("silent") == []
        _check_weights(strategy, [command.records(rank) for rank in survivors], replicas, before, died)
        assert checkpoint.damage(command.folder / "checkpoints" / "last") is None
        assert set(survivors) <= set(checkpoint.parts(command.folder / "checkpoints" / "last"))


def _updates_at(records: list[dict], time: float) -> int:
    return max(r["updates"] for r in records if r["time_seconds"] <= time)


def _check_weights(
    strategy: str, records: list[list[dict]], replicas: int, before: float, died: dict
) -> None:
    """Whoever takes a mean over all takes it over the living, from the death on."""
    if strategy == "gala":  # hears one peer a round, whoever lives
        assert all(r[-1]["rounds"] > 0 for r in records)
        return
    for of_one in records:
        early = [r for r in of_one if r["time_seconds"] < before]
        # the first one after the news may tell of an update before it
        late = [r for r in of_one if r["time_seconds"] > died["time_seconds"]][1:]
        # local SGD hears only itself between two rounds
        alone = {1} if strategy == "local-sgd" else set()
        assert {r["heard"] for r in early} <= {replicas} | alone
        assert {r["heard"] for r in late} <= {replicas - 1} | alone
        assert late


def test_all_killed_is_a_failure_that_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    options = ("--replicas", 2, "--env-steps", 10**9, "--checkpoint-every-env-steps", 2_000)
    with training(tmp_path / "run", "cartpole-gala", *options) as command:
        command.until_checkpoint()
        for pid in command.pids().values():
            os.kill(pid, signal.SIGKILL)
        assert command.wait() == 1
        command.leaves_nothing()
        assert "failed: all replicas died" in command.said()
        assert f"is kept: murmurate resume {command.folder}" in " ".join(command.said().split())
        assert "went on" not in command.said()
        assert command.summary()["exit"].startswith("failed: all replicas died")
        assert sorted(command.summary()["dead_replicas"]) == [0, 1]
        assert checkpoint.damage(command.folder / "checkpoints" / "last") is None


@pytest.mark.slow
def test_a_dead_replica_is_back_after_a_resume_with_its_own_count_and_other_games(tmp_path: Path) -> None:
    options = ("--strategy", "all-reduce", "--replicas", 2, "--env-steps", 10**9)
    often = ("--checkpoint-every-env-steps", 2_000, "--record-every-seconds", 1e-9)
    with training(tmp_path / "run", "cartpole-gala", *options, *often) as command:
        command.learning(2)
        os.kill(command.pids()[1], signal.SIGKILL)
        died = until(lambda: command.events("died"), "the death to be noticed")[0]
        at_death = died["env_steps"]
        until(lambda: _manifest(command.folder).get("dead") == [1], "a checkpoint without replica 1")
        os.kill(command.process.pid, signal.SIGKILL)
        command.wait()
        command.leaves_nothing()
    manifest = _manifest(tmp_path / "run")
    assert manifest["env_steps"] == sum(manifest["replica_env_steps"])
    assert manifest["replica_env_steps"][1] <= at_death
    assert manifest["replica_env_steps"][1] < manifest["replica_env_steps"][0]

    end = manifest["env_steps"] + 2_560
    assert main(["resume", str(tmp_path / "run"), "--env-steps", str(end)]) == 0
    resumed = Written(tmp_path / "run")
    assert resumed.summary()["dead_replicas"] == []
    assert resumed.summary()["env_steps"] == end
    # equal parameters and, were the games the same, equal losses
    last = {r["updates"]: r["loss"] for r in resumed.records(0)}
    mine = {r["updates"]: r["loss"] for r in resumed.records(1) if r["updates"] in last}
    resumed_at = max(last) - 10
    assert all(last[u] != loss for u, loss in mine.items() if u > resumed_at)
    assert any(u > resumed_at for u in mine)


def _manifest(folder: Path) -> dict:
    last = folder / "checkpoints" / "last"
    return checkpoint.read_manifest(last) if checkpoint.damage(last) is None else {}
