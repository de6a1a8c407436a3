"""The inline launcher: whole runs in this process, repeatable from the seed."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.record import groups
from murmurate.record.runs import open_run
from murmurate.record.stored import seal
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import simulate
from murmurate.strategies import strategies
from murmurate.strategies.dpsgd.master import Master
from murmurate.strategies.interface import Strategy
from murmurate.training import checkpoint
from murmurate.training.loop import TrainingLoop
from murmurate.training.run import Run
from murmurate.training.worker_context import Restored, Resume
from short_runs import altered, resume, train


def short(strategy: str | Strategy = "gala", **fields: Any) -> Run:
    """A run of a second: CartPole, inline."""
    settings: dict[str, Any] = {
        "strategy": strategies()[strategy]() if isinstance(strategy, str) else strategy,
        "replicas": 1 if strategy == "solo" else 3,
        "simulators": 4,
        "env_steps": None,
        "updates": 12,
        "stop_at_return": None,
        "launcher": "inline",
        "eval_episodes": 1,
        "record_every_seconds": 1e-9,
    }
    return altered(recipe("cartpole-gala"), **{**settings, **fields})


def params(folder: Path) -> list[torch.Tensor]:
    """Of every replica, as one vector each."""
    last = folder / "checkpoints" / "last"
    found = []
    for rank in checkpoint.parts(last):
        named = checkpoint.read_part(last, rank)["replicas"]["a2c"]["replica"]["params"]
        found.append(torch.cat([named[name].flatten() for name in sorted(named)]))
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["gala", pytest.param("hogwild", marks=pytest.mark.slow)])
def test_an_asynchronous_run_is_repeatable_from_its_seed(strategy: str, tmp_path: Path) -> None:
    # checkpoints on the way, whose moments must not depend on the clock either
    fields = {"updates": 40, "checkpoint_every_env_steps": 300}
    for name, seed in (("one", 5), ("again", 5), ("other", 6)):
        finish = train(short(strategy, seed=seed, **fields), tmp_path / name)
        assert finish.code == 0
    one, again, other = (params(tmp_path / name) for name in ("one", "again", "other"))
    assert len(one) == 3
    for x, y, z in zip(one, again, other, strict=True):
        assert torch.equal(x, y)
        assert not torch.allclose(x, z)
    checkpoints = [r["env_steps"] for r in records(tmp_path / "one") if r.get("event") == "checkpoint"]
    assert checkpoints == [
        r["env_steps"] for r in records(tmp_path / "again") if r.get("event") == "checkpoint"
    ]
    assert len(checkpoints) > 2


@pytest.mark.parametrize("strategy", sorted(strategies()))
def test_every_strategy_trains_saves_and_goes_on(strategy: str, tmp_path: Path) -> None:
    run = short(strategy)
    assert train(run, tmp_path / "run").code == 0
    first = params(tmp_path / "run")
    finish = resume(tmp_path / "run", lambda stored: dataclasses.replace(stored, updates=24))
    assert finish.code == 0
    assert finish.summary["updates"] >= 24
    last = tmp_path / "run" / "checkpoints" / "last"
    for rank in range(run.replicas):
        part = checkpoint.read_part(last, rank)
        assert part["replicas"]["a2c"]["replica"]["clock"] == part["updates"] >= 24
        # what it counts is what it learned from: simulators x steps an update
        assert part["env_steps"] == part["updates"] * run.source.simulators * run.learner.steps
    assert all(not torch.equal(x, y) for x, y in zip(first, params(tmp_path / "run"), strict=True))
    for rank in range(run.replicas):
        mine = [r for r in records(tmp_path / "run") if r["replica"] == rank and "kind" not in r]
        assert [r["time_seconds"] for r in mine] == sorted(r["time_seconds"] for r in mine)
        assert [r["updates"] for r in mine] == sorted(r["updates"] for r in mine)
        assert mine[-1]["env_steps"] == checkpoint.read_part(last, rank)["env_steps"]


def test_a_run_whose_centre_refuses_everything_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Master, "is_valid", lambda self, x: False)
    finish = train(short("dpsgd", updates=30), tmp_path / "x")
    said = [r["message"] for r in records(tmp_path / "x") if r.get("event") == "warning"]
    assert finish.summary["refused"] > 0
    assert len(said) == 1
    assert re.search("the centre has refused all .* for 'a2c'.* has not changed", said[0])


@pytest.mark.parametrize(
    ("name", "options", "updates", "remedy"),
    [
        ("elastic", {}, 10, "--strategy.period"),
        ("elastic", {}, 11, None),
        ("parameter-server", {"period": 5}, 4, "--strategy.period"),
        ("dpsgd", {"threads": 1, "batch": 4}, 10, "--strategy.local-updates or --strategy.batch"),
    ],
)
@pytest.mark.parametrize("start", [train, functools.partial(simulate, cluster=Cluster(), quiet=True)])
def test_a_run_of_which_the_centre_hears_nothing_is_reported(
    start: Any, name: str, options: dict[str, int], updates: int, remedy: str | None, tmp_path: Path
) -> None:
    run = short(strategies()[name](**options), updates=updates)
    start(run, folder=tmp_path / "run")
    said = [r["message"] for r in records(tmp_path / "run") if r.get("event") == "warning"]
    assert len(said) == (remedy is not None)
    for words in said:
        assert re.search(f"no update of 'a2c' .* has not changed.*--updates.*{remedy}", words)


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd", "solo"])
def test_stopped_and_resumed_equals_uninterrupted(strategy: str, tmp_path: Path) -> None:
    # a constant rate: a schedule would know of the earlier end
    whole = short(strategy, updates=20, probe_every_updates=7)
    whole = dataclasses.replace(whole, learner=dataclasses.replace(whole.learner, learning_rate_end=1.0))
    train(whole, tmp_path / "whole")
    train(dataclasses.replace(whole, env_steps=400), tmp_path / "parts")  # ends before its 20 updates
    assert checkpoint.read_part(tmp_path / "parts/checkpoints/last", 0)["updates"] < 20
    resume(tmp_path / "parts", lambda run: dataclasses.replace(run, env_steps=None))
    assert json.loads((tmp_path / "parts/run.json").read_text())["env_steps"] is None
    for x, y in zip(params(tmp_path / "whole"), params(tmp_path / "parts"), strict=True):
        assert torch.equal(x, y)
    # the stop came between asking an update for its size (the fifth) and the look that tells it
    sizes = [
        [
            (r["replica"], r["updates"], r["update_norm"])
            for r in records(tmp_path / name)
            if "update_norm" in r
        ]
        for name in ("whole", "parts")
    ]
    assert sorted(sizes[0]) == sorted(sizes[1])
    # each is due one update before a multiple of seven
    assert {updates for _, updates, _ in sizes[0]} == (set() if strategy == "solo" else {6, 13, 20})


@pytest.mark.parametrize("strategy", ["local-sgd", "synchronous-elastic"])
def test_rounds_neither_put_off_the_last_update_nor_end_with_it(strategy: str, tmp_path: Path) -> None:
    # a constant rate: a schedule would know of the earlier end
    whole = short(strategy, updates=22)
    whole = dataclasses.replace(whole, learner=dataclasses.replace(whole.learner, learning_rate_end=1.0))
    assert train(whole, tmp_path / "whole").summary["updates"] == 22
    assert train(dataclasses.replace(whole, updates=14), tmp_path / "parts").summary["updates"] == 14
    resume(tmp_path / "parts", lambda run: dataclasses.replace(run, updates=22))
    for x, y in zip(params(tmp_path / "whole"), params(tmp_path / "parts"), strict=True):
        assert torch.equal(x, y)


def test_updates_of_the_summary_are_the_median_and_env_steps_the_total(tmp_path: Path) -> None:
    finish = train(short(updates=None, env_steps=2_000, seed=2), tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "last"
    own = sorted(checkpoint.read_part(last, rank)["updates"] for rank in range(3))
    assert own[1] < own[2], "choose a seed with which they differ"
    assert finish.summary["updates"] == own[1]
    assert finish.summary["env_steps"] == sum(own) * 4 * 8


def test_a_resumed_run_drops_the_lost_future(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(short("all-reduce", updates=10), folder)
    manifest = checkpoint.read_manifest(folder / "checkpoints" / "last")
    with (folder / "metrics.jsonl").open("a") as file:  # what a run writes after its last checkpoint
        for rank, steps, later in ((0, 1, 0.0), (1, 9_999, 0.0), (2, 1, 5.0)):
            line = {"time_seconds": manifest["seconds"] - 1e-6 + later, "env_steps": steps, "updates": 1}
            file.write(json.dumps({**line, "replica": rank, "loss": 777.0}, separators=(",", ":")) + "\n")
    resume(folder, lambda run: dataclasses.replace(run, updates=12))
    strange = [r["replica"] for r in records(folder) if r.get("loss") == 777.0]
    assert strange == [0], "one is neither later nor further than the checkpoint; the others are the future"


def _stored_rate(folder: Path, rate: float) -> None:
    """Another learning rate in run.json: no option leads there, as a resume refuses another agent."""
    stored = json.loads((folder / "run.json").read_text())
    stored["agent"]["learning_rate"] = rate
    (folder / "run.json").write_text(json.dumps(seal(stored, "run.json")))


def test_not_a_number_stops_with_the_culprit_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(short(updates=10), folder).code == 0
    before = {p.name: p.read_bytes() for p in (folder / "checkpoints" / "last").iterdir()}
    _stored_rate(folder, 1e30)
    finish = resume(folder, lambda run: dataclasses.replace(run, updates=50))
    assert finish.code == 1
    assert re.match(
        r"failed: replica [0-2]: the (loss|gradient|parameters) of replica 'a2c' .*update 1\d",
        finish.summary["exit"],
    )
    after = {p.name: p.read_bytes() for p in (folder / "checkpoints" / "last").iterdir()}
    assert before == after


def test_parameters_that_are_not_finite_never_become_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert train(short(updates=10), folder).code == 0
    before = {p.name: p.read_bytes() for p in (folder / "checkpoints" / "last").iterdir()}
    # one update more: its loss is fine, and the parameters are not, which no rate within its range causes
    monkeypatch.setattr("murmurate.training.run.check_ranges", lambda run: None)
    _stored_rate(folder, float("inf"))
    finish = resume(folder, lambda run: dataclasses.replace(run, updates=11))
    assert finish.code == 1
    assert "the parameters of replica 'a2c' are not finite at its update 11" in finish.summary["exit"]
    assert before == {p.name: p.read_bytes() for p in (folder / "checkpoints" / "last").iterdir()}


def test_it_stops_at_a_return(tmp_path: Path) -> None:
    finish = train(short(updates=5_000, stop_at_return=5.0, simulators=16), tmp_path / "run")
    assert finish.code == 0
    assert "reached 5" in finish.summary["stopped_because"]
    assert 0 < finish.summary["updates"] < 5_000
    assert finish.summary["train_return_mean"] >= 5.0
    episodes = [pair for r in records(tmp_path / "run") for pair in r.get("episode_returns") or ()]
    assert len(episodes) >= 100, "a mean over 100 episodes needs a hundred of them"
    reached = groups.reaches(open_run(tmp_path / "run"), 5.0)
    assert reached is not None, "the report counts as stop_at_return does"
    assert reached[0] <= finish.summary["env_steps"]


def test_a_resume_counts_each_episode_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(short("all-reduce", updates=20), folder)
    episodes = sum(len(r.get("episode_returns") or ()) for r in records(folder))
    # were those of the first part counted twice, a hundred would be reached at once
    assert 50 <= episodes < 90
    finish = resume(folder, lambda run: dataclasses.replace(run, updates=21, stop_at_return=5.0))
    assert finish.summary["stopped_because"] == ""


def test_what_a_replica_resumes_from_is_released_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(short("solo", updates=2), tmp_path / "run")
    read, run_to_end = Resume.part, TrainingLoop.run_to_end
    references: list[weakref.ref[Restored]] = []
    alive: list[Restored | None] = []

    def noted(resumed: Resume, rank: int) -> Restored:
        restored = read(resumed, rank)
        references.append(weakref.ref(restored))
        return restored

    def checked(loop: TrainingLoop) -> None:
        alive.extend(reference() for reference in references)
        run_to_end(loop)

    monkeypatch.setattr(Resume, "part", noted)
    monkeypatch.setattr(TrainingLoop, "run_to_end", checked)
    resume(tmp_path / "run", lambda run: dataclasses.replace(run, updates=3))
    assert alive == [None]


def test_all_roles_are_this_process(tmp_path: Path) -> None:
    train(short(updates=2), tmp_path / "run")
    roles = [json.loads(line) for line in (tmp_path / "run" / "roles.jsonl").read_text().splitlines()]
    assert [(r["role"], r["index"], r["pid"]) for r in roles] == [
        ("replica", i, os.getpid()) for i in range(3)
    ]


def test_a_first_batch_that_was_collected_is_lost_where_members_agree_to_stop(tmp_path: Path) -> None:
    run = dataclasses.replace(short("all-reduce"), updates=None, minutes=1e-9)
    finish = train(run, tmp_path / "run")
    assert finish.summary["updates"] == 0
    assert finish.summary["env_steps"] > 0
    assert not finish.summary["resume_exact"]


def test_the_wrong_number_of_replicas_is_refused(tmp_path: Path) -> None:
    train(short(updates=2), tmp_path / "run")
    with pytest.raises(Refusal, match="made with 3 replicas"):
        resume(tmp_path / "run", lambda run: dataclasses.replace(run, replicas=2))


@pytest.mark.parametrize("replicas", [1, 2])  # two agree on it
def test_time_ends_a_run_that_has_not_begun_to_learn(replicas: int, tmp_path: Path) -> None:
    run = recipe("cartpole-dqn")
    replay = dataclasses.replace(run.source.replay, capacity=10**6, learning_starts=10**6)
    source = dataclasses.replace(run.source, replay=replay)
    fields = {"minutes": 0.005, "env_steps": None, "launcher": "inline", "stop_at_return": None}
    run = dataclasses.replace(run, source=source, replicas=replicas, **fields)
    finish = train(run, tmp_path / "run")
    assert finish.summary["exit"] == "finished"
    assert finish.summary["resume_exact"]
    assert finish.summary["updates"] == 0
    assert finish.summary["env_steps"] < 10**6
