"""Replicas that die or fall silent, and come back with a living peer's state: real processes and signals."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.commands import Command, training
from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from murmurate.training import checkpoint
from waiting import until

pytestmark = pytest.mark.timeout(900)
_OFTEN = ("--record-every-seconds", 0.05, "--env-steps", 10**9)


def _learning_again(command: Command, victim: int) -> dict[str, Any]:
    """Wait until ``victim`` is back and every replica has learned on; its first record since."""
    until(
        lambda: command.events("joined") or command.process.poll() is not None,
        f"replica {victim} to be back; it said: {command.said()}",
    )
    joined_at = command.events("joined")[0]["time_seconds"]
    replicas = len(command.pids())

    def since(rank: int) -> list[dict[str, Any]]:
        return [r for r in command.records(rank) if r["time_seconds"] > joined_at]

    until(lambda: all(len(since(rank)) >= 4 for rank in range(replicas) if command.records(rank)), "records")
    return since(victim)[0]


def _stop(command: Command) -> dict[str, Any]:
    command.kill_group(signal.SIGINT)
    assert command.wait() == 130, command.said()
    command.leaves_nothing()
    assert "Traceback" not in "".join(log.read_text() for log in (command.folder / "logs").iterdir())
    return command.summary()


def _parts(command: Command) -> list[dict[str, Any]]:
    last = command.folder / "checkpoints" / "last"
    return [checkpoint.read_part(last, rank)["replicas"]["a2c"]["replica"] for rank in range(3)]


def _names(summary: dict[str, Any], member: int) -> list[str]:
    return [e["event"] for e in summary["events"] if e.get("member") == member]


def _is_same(one: dict[str, Any], other: dict[str, Any], keys: tuple[str, ...]) -> bool:
    return all(
        torch.equal(x, other[key][name])
        for key in keys
        for name, x in one[key].items()
        if isinstance(x, torch.Tensor)
    )


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        pytest.param("gala", 1, marks=pytest.mark.slow),
        ("all-reduce", 0),
        pytest.param("all-reduce", 2, marks=pytest.mark.slow),
        pytest.param("local-sgd", 0, marks=pytest.mark.slow),
        pytest.param("hogwild", 0, marks=pytest.mark.slow),
        pytest.param("parameter-server", 1, marks=pytest.mark.slow),
        pytest.param("dpsgd", 0, marks=pytest.mark.slow),
        pytest.param("push-sum", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_replica_comes_back_with_a_living_peers_state(
    strategy: str, victim: int, tmp_path: Path
) -> None:
    options = ("--strategy", strategy, "--replicas", 3, "--restarts", 1, *_OFTEN)
    with training(tmp_path / "run", "cartpole-gala", *options) as command:
        command.learning(3, records=6)
        before = command.records(victim)[-1]
        others = (command.records(rank)[-1] for rank in range(3) if rank != victim)
        donor_before = min(others, key=lambda record: record["updates"])  # whoever it will be
        first_pid = command.pids()[victim]
        os.kill(first_pid, signal.SIGKILL)
        first = _learning_again(command, victim)
        assert command.pids()[victim] != first_pid
        summary = _stop(command)

        assert _names(summary, victim) == ["died", "restarted", "joined"]
        assert all(_names(summary, other) == [] for other in range(3) if other != victim)
        died, joined = (
            next(e for e in summary["events"] if e["event"] == name) for name in ("died", "joined")
        )
        assert joined["epoch"] > died["epoch"]
        assert joined["time_seconds"] > died["time_seconds"]
        assert summary["dead_replicas"] == []
        assert f"replica {victim} is back, with the state of replica" in command.said()

        # its own count of env steps goes on, and its clock is a living peer's: no new beginning
        assert first["env_steps"] > before["env_steps"]
        shares_memory = strategy in ("hogwild", "dpsgd")
        assert first["updates"] > (before if shares_memory else donor_before)["updates"]
        assert summary["env_steps"] == sum(command.records(rank)[-1]["env_steps"] for rank in range(3))
        steps = [r["env_steps"] for r in command.records(victim)]
        assert steps == sorted(steps)
        assert command.records(victim)[-1]["rounds"] > first["rounds"], "it agrees with others"
        assert summary["disagreement_final"] < 0.5
        parts = _parts(command)
        if strategy == "all-reduce":  # one wrong moment, and they would have drifted apart
            assert all(_is_same(parts[0], part, ("params", "optimizer")) for part in parts[1:])
            assert len({part["clock"] for part in parts}) == 1
        if strategy == "hogwild":
            assert summary["disagreement_final"] == 0.0
        if strategy == "all-reduce":
            heard = [r["heard"] for r in command.records((victim + 1) % 3)]
            assert heard[0] == heard[-1] == 3


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["false", "true"])
def test_a_learner_whose_replicas_have_collectives_of_their_own_goes_on_after_a_death(
    normalize: str, tmp_path: Path
) -> None:
    """TRPO: the one that comes back takes part in the means, also in those of running statistics, and the
    policies stay equal to the bit."""
    normalized = ("--agent.normalize-observations", normalize, "--agent.scale-rewards", normalize)
    options = ("--replicas", 3, "--restarts", 1, "--simulators", 2, "--agent.value-epochs", 2, *_OFTEN)
    options += normalized
    with training(tmp_path / "run", "cartpole-trpo", *options) as command:
        command.learning(3, records=3)
        os.kill(command.pids()[1], signal.SIGKILL)
        _learning_again(command, 1)
        summary = _stop(command)
        assert _names(summary, 1) == ["died", "restarted", "joined"]
        last = command.folder / "checkpoints" / "last"
        policies = [checkpoint.read_part(last, rank)["replicas"]["policy"]["replica"] for rank in range(3)]
        assert all(_is_same(policies[0], policy, ("params",)) for policy in policies[1:])


def test_the_death_of_the_centre_fails_the_run_and_names_it(tmp_path: Path) -> None:
    options = ("--strategy", "parameter-server", "--replicas", 2, "--restarts", 5, *_OFTEN)
    often = ("--checkpoint-every-env-steps", 500)
    with training(tmp_path / "run", "cartpole-gala", *options, *often) as command:
        command.until_checkpoint()
        os.kill(command.pids()[2], signal.SIGKILL)
        assert command.wait() == 1, command.said()
        command.leaves_nothing()
        assert "the centre died (SIGKILL)" in command.said()
        assert f"murmurate resume {command.folder}" in " ".join(command.said().split())
        assert command.summary()["exit"].startswith("failed: the centre died")
        assert checkpoint.damage(command.folder / "checkpoints" / "last") is None
        assert "Traceback" not in command.said()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_a_stopped_replica_holds_a_round_up_to_the_deadline_and_then_comes_back(
    strategy: str, tmp_path: Path
) -> None:
    options = ("--strategy", strategy, "--replicas", 3, *_OFTEN, "--checkpoint-every-env-steps", 5_000)
    with training(tmp_path / "run", "cartpole-gala", *options) as command:
        command.learning(3)
        command.until_checkpoint()
        pid = command.pids()[1]
        os.kill(pid, signal.SIGSTOP)
        _learning_again(command, 1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # it wakes up to nothing: it has been ended
        summary = _stop(command)
        assert _names(summary, 1) == ["silent", "excluded", "died", "restarted", "joined"]
        (excluded,) = command.events("excluded")
        assert 5.0 <= excluded["deadline_seconds"] <= 45.0
        assert summary["dead_replicas"] == []
        assert summary["disagreement_final"] == 0.0 or strategy != "all-reduce"
        parts = _parts(command)
        if strategy == "all-reduce":
            assert all(_is_same(parts[0], part, ("params", "optimizer")) for part in parts[1:])
        assert "silent" in command.said()


@pytest.mark.slow
def test_a_stopped_replica_is_silent_under_gala_and_goes_on_when_it_wakes(tmp_path: Path) -> None:
    options = ("--strategy", "gala", "--replicas", 3, *_OFTEN)
    with training(tmp_path / "run", "cartpole-gala", *options) as command:
        command.learning(3, records=10)
        pid = command.pids()[1]
        os.kill(pid, signal.SIGSTOP)
        silent = until(lambda: command.events("silent"), "silence to be noticed")[0]
        others = {rank: len(command.records(rank)) for rank in (0, 2)}
        until(lambda: all(len(command.records(r)) > n + 3 for r, n in others.items()), "the others to go on")
        os.kill(pid, signal.SIGCONT)
        until(lambda: command.events("woke"), "its waking to be noticed")
        known = len(command.records(1))
        until(lambda: len(command.records(1)) > known + 3, "it to go on")
        assert command.pids()[1] == pid
        summary = _stop(command)
        assert _names(summary, 1) == ["silent", "woke"]
        assert silent["member"] == 1
        assert summary["dead_replicas"] == []
        assert summary["disagreement_final"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gala", "all-reduce"])
def test_every_replica_in_turn_dies_and_comes_back(strategy: str, tmp_path: Path) -> None:
    """Nothing of the state that all began with is left in any process but by way of the living."""
    options = ("--strategy", strategy, "--replicas", 3, "--restarts", 1, *_OFTEN)
    with training(tmp_path / "run", "cartpole-gala", *options) as command:
        command.learning(3)
        for number, victim in enumerate((0, 1, 2), start=1):
            os.kill(command.pids()[victim], signal.SIGKILL)
            until(lambda n=number: len(command.events("joined")) == n, f"replica {victim} to be back")
        most = max(len(command.records(rank)) for rank in range(3))
        command.learning(3, records=most + 3)  # all of them go on together
        summary = _stop(command)
        assert summary["dead_replicas"] == []
        assert [e["member"] for e in summary["events"] if e["event"] == "joined"] == [0, 1, 2]
        assert summary["disagreement_final"] < 0.5


def test_a_killed_replica_of_a_run_that_learns_from_documents_comes_back(tmp_path: Path) -> None:
    corpus = tmp_path / "docword.small.txt"
    write(generate(documents=400, vocabulary=60, topics=3, mean_length=20, seed=0).corpus, corpus, "uci")
    options = ("--topics", 3, "--batch", 8, "--strategy", "gala", "--replicas", 3, "--restarts", 1)
    words = ("topics", "fit", corpus, *options, *_OFTEN, "--out", tmp_path / "run")
    with Command(tmp_path / "run", *words) as command:
        command.learning(3, records=6)
        before = command.records(1)[-1]
        os.kill(command.pids()[1], signal.SIGKILL)
        first = _learning_again(command, 1)
        summary = _stop(command)
    assert _names(summary, 1) == ["died", "restarted", "joined"]
    assert summary["dead_replicas"] == []
    assert first["env_steps"] > before["env_steps"]
    assert first["passes"] > 0
