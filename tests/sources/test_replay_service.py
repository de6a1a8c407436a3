"""A replay service of one learner: what it refuses, what it needs, what it draws, and how its parts die."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from murmurate.bench._numbered import NumberedLearner
from murmurate.bench._service_counts import ServicePlan, serve_and_count, service_run
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replay import memory
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.sources.replay_service import ReplayServiceSourceConfig
from murmurate.sources.replay_source import ReplaySource
from murmurate.sources.service_source import ServiceSource
from murmurate.training.members import open_only_source
from murmurate.training.run import Run
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(3 * DEADLINE_SECONDS)
REPLAY = ReplayConfig(capacity=300, learning_starts=40, samples_per_insert=4.0, alpha=1.0, epsilon=0.0)
CONFIG = ReplayServiceSourceConfig(simulators=4, actors=1, samplers=1, block=2, slack=24, replay=REPLAY)


def run_of(**changes: Any) -> Run:
    run = service_run(ServicePlan(learners=1, batch=16))
    return dataclasses.replace(run, source=dataclasses.replace(CONFIG, **changes))


def refusal(replicas: int = 1, batch: int = 16, **changes: Any) -> str:
    run = dataclasses.replace(run_of(**changes), replicas=replicas, learner=NumberedLearner(batch))
    with pytest.raises(Refusal) as caught:
        run.validate()
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shards": 2}, "2 shards are filled by 1 actors, and each needs one. Use --shards 1"),
        ({"actors": 5}, "5 actors share 4 simulators"),
        ({"replicas": 17}, "a batch of 16 has a part from each of 17 shards"),
        ({"slack": 23}, "slack is 23: draws and inserts would wait for one another for ever. Use --slack 48"),
        ({"slack": 24, "replay": {"samples_per_insert": 1.0}}, "Use --slack 72, or 0"),
        ({"replay": {"fit_every": 40}}, "replay.fit_every is 40, and in a replay service actors never wait"),
        ({"replay": {"ahead": 2}}, "samplers draw ahead: use --samplers. Leave out --replay.ahead"),
        ({"replay": {"weights": "all"}}, "weights are always those of all shards together"),
        ({"replay": {"folder": "/tmp"}}, "Use --replay.saved false"),
        (
            {"replay": {"segments": 2, "segment_draws": "one"}, "shards": 2, "actors": 2},
            "a part from each of 2 shards, .* Use --replay.segment-draws each",
        ),
        ({"replay": {"capacity": 301}, "shards": 2, "actors": 2}, "Use --replay.capacity 300"),
        ({"replay": {"capacity": 10}, "slack": 100}, "replay.capacity is 10 and a batch is 16"),
    ],
)
def test_refusals_name_the_remedy(changes: dict[str, Any], words: str) -> None:
    if "replay" in changes:
        starts = {"learning_starts": 0}
        changes = {**changes, "replay": dataclasses.replace(REPLAY, **{**starts, **changes["replay"]})}
    assert re.search(words, refusal(**changes))


def test_without_actors_the_learner_has_a_replay_of_its_own() -> None:
    alone = run_of(actors=0)
    assert alone.source.acting_processes() == 0
    learner = alone.learner.build(Context(alone.world.spec(), Replica, 0))
    source = open_only_source(alone, learner)
    assert isinstance(source, ReplaySource)
    source.close()


def test_memory_is_that_of_replay_batches_and_processes() -> None:
    def needed(**changes: Any) -> int:
        run = run_of(**changes)
        return run.source.memory_bytes(run)

    replay = dataclasses.replace
    unsaved = replay(REPLAY, saved=False)
    rows = 300 * (2 * 68 + 24 + 64 + 16)
    assert needed() - needed(replay=unsaved) == rows, "the learner has a copy while it saves"
    assert needed(replay=replay(unsaved, capacity=600)) - needed(replay=unsaved) == rows
    of_slots = needed(block=4) - needed(block=2)
    assert 2 * 2 * 16 * (2 * 68 + 24 + 24) <= of_slots <= 2 * 2 * 16 * (2 * 68 + 24 + 24) + 10 * 64
    assert needed(samplers=2) - needed() == of_slots + 64 * 2 + 64 + 30 * 2**20
    assert needed(actors=2, shards=2) - needed() >= 300 * 2**20


def test_files_of_all_shards_and_learners_fit_on_the_disk_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: Path, free: int) -> None:
        replay = dataclasses.replace(REPLAY, folder=str(folder), saved=False)
        run = dataclasses.replace(run_of(replay=replay, actors=2, shards=2), replicas=2)
        monkeypatch.setattr(memory.psutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        run.source.memory_bytes(run)

    needed = 2 * 300 * (2 * 68 + 24 + 64 + 16)
    check(tmp_path, needed)
    with pytest.raises(Refusal, match=r"the replays need .* or another --replay.folder"):
        check(tmp_path, needed - 1)
    with pytest.raises(Refusal, match="/dev/null is not a folder that can be written to"):
        check(Path("/dev/null"), needed)
    earlier = tmp_path / "shard-1" / "replica-1"  # whose files are overwritten
    earlier.mkdir(parents=True)
    (earlier / "transitions.bin").write_bytes(b"1")
    check(tmp_path, needed - 1)


def test_what_a_checkpoint_takes_is_the_rows(tmp_path: Any) -> None:
    run, unsaved = run_of(), run_of(replay=dataclasses.replace(REPLAY, saved=False))
    assert run.source.saved_bytes(run) == 300 * (2 * 68 + 24 + 64 + 16)
    assert unsaved.source.saved_bytes(unsaved) == 0


# -- with processes ---------------------------------------------------------------------------------------


def opened(run: Run) -> tuple[ServiceSource, Any]:
    learner = run.learner.build(Context(run.world.spec(), Replica, 0))
    source = open_only_source(run, learner)
    assert isinstance(source, ServiceSource)
    return source, learner


def steps_in(run: Run, state: dict[str, Any]) -> Any:
    """The replay with a saved shard's contents."""
    replay = open_replay(run.source.replay, run.world.spec(), simulators=4, steps=1, discount=0.99, seed=0)
    replay.load(state["replays"]["shard0"]["store"])
    return replay


def test_draws_priorities_and_what_a_checkpoint_brings_back() -> None:
    run = run_of()
    source, _ = opened(run)
    told: dict[int, float] = {}
    played = batches = 0
    try:
        # until the replay is full, and half of it overwritten
        while played < 450:
            batch = next(source)
            data = batch.data
            played, batches = played + batch.env_steps, batches + 1
            assert data.observation.shape == (16, 17)
            assert torch.equal(data.next_observation[:, 2], data.observation[:, 2] + 1)
            assert torch.equal(data.next_observation[:, :2], data.observation[:, :2])
            assert data.weights.max() == 1
            errors = (
                0.5 + data.keys.remainder(7).float()
            )  # by the transition: alike, however often it is drawn
            told |= dict(zip(data.keys.tolist(), errors.tolist(), strict=True))
            batch.feedback(errors)
            assert 16 * batches <= 4.0 * (source.fields()["replay_transitions"] and played - 40 + 24 + 4)
        source.hold()
        state = source.state()
        counts = state["shards"][0]
        assert played == counts["reported"] <= counts["inserted"] <= 40 + counts["drawn"] / 4.0 + 24
        assert counts["drawn"] <= 4.0 * (counts["inserted"] - 40)
        assert counts["drawn"] == 16 * batches + source.waiting_draws
        replay = steps_in(run, state)
        assert len(replay) == 300
        oldest = counts["inserted"] - 300
        heard = 0
        for slot in range(300):
            key = oldest + (slot - oldest) % 300
            priority = float(replay.sampler.tree.priorities[slot])
            if key in told and priority == pytest.approx(told[key]):
                heard += 1
        assert heard >= 200, (
            "errors of late batches are still on their way, and those of overwritten rows dropped"
        )
        next(source)  # it goes on
    finally:
        source.close()
    again, _ = opened(run)
    try:
        again.load(state)
        seen: list[int] = []
        again.alive = lambda played: bool(seen.append(played))  # type: ignore[func-returns-value]
        batch = next(again)
        assert min([*seen, batch.env_steps]) >= 0
        unreported = counts["inserted"] - counts["reported"]
        assert batch.env_steps <= unreported + 24, "the learner begins at once"
        played = batch.env_steps
        # what was inserted before, and not reported, is counted now; until the actors have inserted
        while played <= unreported:
            played += next(again).env_steps
        later = again.state()
        assert later["shards"][0]["inserted"] >= counts["inserted"]
        assert later["shards"][0]["drawn"] > counts["drawn"]
        kept = steps_in(run, later).rows.column("observation")[:, 1]
        assert len(set(kept.tolist())) == 2, "steps of the actors before, and of those now"
        next(again)
        os.kill(again.pids["shards"][0], signal.SIGKILL)
        with pytest.raises(
            RunFailed, match=r"replay shard 0 of replica 0 died \(signal 9\).*murmurate resume"
        ):
            until(lambda: next(again) is None)
    finally:
        again.close()


def test_no_lag_is_reported_before_an_actor_has_sent_a_step() -> None:
    """As after a resume, when batches are drawn from a saved replay before the actors have started."""
    source, learner = opened(run_of())
    try:
        for replica in learner.replicas.values():
            replica.clock = 5_000
        assert source.fields()["actor_lag_updates"] == 0
    finally:
        source.close()


def test_nothing_is_lost_or_doubled_by_kills_of_actors_and_samplers() -> None:
    plan = ServicePlan(
        learners=1, actors=2, samplers=2, shards=1, simulators=4, seconds=0.1, kills=1, kill_draws=20,
        filled=100, batch=32, capacity=2**17, slack=64,
    )  # fmt: skip
    count = SimulatedFabric(1, seed=0, keep_log=False).run([lambda fabric: serve_and_count(fabric, plan)])[0]
    assert count["actor_deaths"] == count["sampler_deaths"] == 1
    assert count["lost_inserts"] == count["doubled_inserts"] == 0
    assert count["stored"] == count["inserted"] == count["acknowledged"]
    assert count["drawn"] == count["handed"] + count["waiting_draws"]
    after = count["inserted"] - plan.filled
    assert after - plan.slack <= count["drawn"] / plan.samples_per_insert <= after
