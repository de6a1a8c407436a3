"""Killed and resumed equals uninterrupted, bit for bit, on real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.commands import Written, read_lines, trained, training
from murmurate.cli.main import main
from murmurate.replay.interface import Chunk
from murmurate.training import checkpoint

pytestmark = pytest.mark.timeout(1500)
_UPDATES = 400
# Told by a clock, by how far others happened to be, or honest about what a resume costs.
_OF_THE_MOMENT = {
    "time_seconds", "env_steps_per_second", "waiting_seconds", "spans", "total_env_steps", "bytes_exchanged",
}  # fmt: skip


# so small that it has been filled several times, with batches that were drawn and not yet learned from
_REPLAY = (
    *("--replay.capacity", 700, "--replay.learning-starts", 100, "--replay.ahead", 3),
    *("--simulators", 4, "--agent.batch", 16, "--agent.explore-updates", 100, "--agent.target-every", 7),
)
_SEGMENTS = ("--replay.segments", 4)


@pytest.mark.parametrize(
    ("recipe", "strategy", "replicas", "who_is_killed", "more"),
    [
        ("cartpole-a2c", "all-reduce", 2, "launcher", ()),
        pytest.param("cartpole-a2c", "local-sgd", 2, "everybody", (), marks=pytest.mark.slow),
        pytest.param("cartpole-a2c", "solo", 1, "everybody", (), marks=pytest.mark.slow),
        pytest.param(
            *("cartpole-dqn", "local-sgd", 2, "everybody"),
            (*_REPLAY, *_SEGMENTS, "--agent.selector", "agreed"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("cartpole-dqn", "solo", 1, "everybody", (*_REPLAY, "--replay.alpha", 0, "--replay.ahead", 0)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(
    recipe: str, strategy: str, replicas: int, who_is_killed: str, more: tuple[Any, ...], tmp_path: Path
) -> None:
    updates = 800 if more else _UPDATES
    options = (
        *more,
        *("--strategy", strategy, "--replicas", replicas, "--updates", updates, "--env-steps", "none"),
        *("--checkpoint-every-env-steps", 1_000 * replicas),
        *("--record-every-seconds", 1e-9, "--probe-every-updates", 25),
    )
    trained(tmp_path / "whole", recipe, *options)
    with training(tmp_path / "killed", recipe, *options) as command:
        command.until_checkpoint()
        for pid in [command.process.pid, *(command.pids().values() if who_is_killed == "everybody" else [])]:
            os.kill(pid, signal.SIGKILL)
        command.wait()
        # nobody is left to tell the others to stop: they notice
        command.leaves_nothing() if who_is_killed == "launcher" else None
        assert not (command.folder / "summary.json").exists()
    found = checkpoint.newest(tmp_path / "killed" / "checkpoints")
    at = checkpoint.read_part(found, 0)["updates"]
    assert 0 < at < updates
    assert main(["resume", str(tmp_path / "killed")]) == 0
    resumed = Written(tmp_path / "killed")
    assert resumed.summary()["resume_exact"]
    assert resumed.summary()["exit"] == "finished"
    assert len(resumed.events("resumed")) == 1

    whole, again = (tmp_path / name / "checkpoints" / "last" for name in ("whole", "killed"))
    assert checkpoint.parts(whole) == checkpoint.parts(again) == list(range(replicas))
    for rank in range(replicas):
        one, other = checkpoint.read_part(whole, rank), checkpoint.read_part(again, rank)
        assert one["updates"] == updates
        for key in ("replicas", "consensus", "source", "learner", "env_steps", "updates", "returns"):
            _same(one[key], other[key], f"replica {rank}: {key}")
        _check_records(tmp_path, rank, updates)
        held = checkpoint.read_replays(whole, rank)
        assert bool(held) == bool(more)
        _same(held, checkpoint.read_replays(again, rank), f"replica {rank}: replay")


def _check_records(folder: Path, rank: int, updates: int) -> None:
    whole, again = (
        [r for r in read_lines(folder / name / "metrics.jsonl") if r["replica"] == rank and "kind" not in r]
        for name in ("whole", "killed")
    )
    times = [r["time_seconds"] for r in again]
    assert times == sorted(times)
    # one record an update, and one more at the end: none was lost, none came twice
    assert [r["updates"] for r in again] == [*range(1, updates + 1), updates]
    for one, other in zip(whole, again, strict=True):
        assert {k: v for k, v in one.items() if k not in _OF_THE_MOMENT} == {
            k: v for k, v in other.items() if k not in _OF_THE_MOMENT
        }


def _same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, Chunk):
        _same(one.values, other.values, where)  # who wrote it may differ
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            _same(a, b, f"{where}[{i}]")
    else:
        assert one == other, where


def test_same_means_the_same() -> None:
    state = {"a": [torch.ones(2), {"b": None}], "c": 1.5}
    _same(state, {"a": [torch.ones(2), {"b": None}], "c": 1.5}, "")
    for other in (
        {"a": [torch.tensor([1.0, 1.0 + 2**-23]), {"b": None}], "c": 1.5},
        {"a": [torch.ones(2), {"b": 0}], "c": 1.5},
        {"a": [torch.ones(2)], "c": 1.5},
        {"a": [torch.ones(2, dtype=torch.float64), {"b": None}], "c": 1.5},
    ):
        with pytest.raises(AssertionError):
            _same(state, other, "")
