"""Actors that make trajectories: what they act with, how old it is, back-pressure, and their death."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch

from murmurate.agents.a2c import A2C
from murmurate.agents.impala import IMPALA
from murmurate.agents.ppo import PPO
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, updates_of
from murmurate.sources import actor_processes
from murmurate.sources.actor_agent import ActorSettings, published_tensors
from murmurate.sources.shared_ring import SharedParameters
from murmurate.sources.trajectory_actor import make_trajectories
from murmurate.sources.trajectory_ring import TrajectoryRing, TrajectoryShape
from murmurate.sources.trajectory_source import TrajectorySource
from murmurate.spec import Episode
from murmurate.training.members import build_learner, open_only_source
from murmurate.training.run import Run
from murmurate.worlds.gym import GymWorld
from short_runs import altered
from sources.deaths import kill_actor_1
from sources.test_actor_source import RestartingWorld
from sources.test_trajectory_ring import trajectory
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(2 * DEADLINE_SECONDS)
AGENT = IMPALA(hidden=8, steps=7, learning_rate=0.02, learning_rate_end=1.0)


def run_of(**changes: Any) -> Run:
    """Two actors with two simulators each; episodes are cut off after nine steps."""
    usual = recipe("cartpole-impala")
    base = dataclasses.replace(
        usual, world=GymWorld("CartPole-v1", 9), learner=AGENT, env_steps=None, updates=99
    )
    return altered(base, **{"simulators": 4, "actors": 2, **changes})


@contextmanager
def acted(**changes: Any) -> Iterator[tuple[TrajectorySource, Any]]:
    run = run_of(**changes)
    learner = build_learner(run, 0, Replica)
    source = open_only_source(run, learner)
    assert isinstance(source, TrajectorySource)
    try:
        yield source, learner
    finally:
        source.close()


@pytest.fixture(scope="module")
def playing() -> Iterator[tuple[TrajectorySource, Any]]:
    """Two actors that several tests share, because they take a second to start."""
    with acted(queue=3) as (source, learner):
        yield source, learner


def pids(source: TrajectorySource) -> list[int]:
    return [actor.process.pid for actor in source._processes.actors if actor.process is not None]


def rings(source: TrajectorySource) -> list[Any]:
    return [actor.ring for actor in source._processes.actors]


@pytest.mark.parametrize("recurrent", [pytest.param(0, marks=pytest.mark.slow), 6], ids=["plain", "lstm"])
def test_each_trajectory_was_made_with_the_policy_that_its_lag_says(recurrent: int) -> None:
    """The probabilities that actors recorded are those of the parameters of so many updates ago, unrolled
    from the recurrent state that came with the trajectory."""
    with acted(learner=dataclasses.replace(AGENT, recurrent=recurrent), queue=2) as (source, learner):
        published: list[torch.Tensor] = []
        lags_seen = set()
        other = build_learner(run_of(learner=learner.config), 0, Replica)
        for number in range(40):
            published.append(learner.replica.params.detach().clone())
            batch = next(source)
            data, lags = batch.data, list(source._lags)
            source.fields()
            assert data.reward.shape == (7, 4)
            assert len(lags) == 2
            for k, lag in enumerate(lags):
                part = slice(2 * k, 2 * k + 2)
                other.replica.params.data.copy_(published[number - lag])
                memory = None if data.memory is None else data.memory[part]
                policy, _, _ = other.net.unroll(data.observation[:, part], memory, data.first[:, part])
                log_prob = policy.log_softmax(-1).gather(-1, data.action[:, part, None])[..., 0]
                recorded = data.behaviour["log_probability"][:, part]
                torch.testing.assert_close(log_prob.detach(), recorded, rtol=1e-4, atol=1e-5)
            lags_seen |= set(lags)
            learner.learn(batch)
        assert min(lags_seen) >= 0
        assert max(lags_seen) > 0, "they act while it learns"
        moved = (published[-1] - published[0]).norm() / published[0].norm()
        assert moved > 0.01, "so that another version would have been noticed"


def test_env_steps_and_episodes_are_counted_and_the_figures_are_plain(playing: Any) -> None:
    source, learner = playing
    batches, played, ended = 0, 0, set[int]()
    before = source.fields()

    def learned() -> bool:
        nonlocal batches, played
        batch = next(source)
        data = batch.data
        assert int((data.truncated | data.terminated).sum()) == len(batch.episodes)
        cut = data.truncated_observation
        assert (0 if cut is None else len(cut)) == int(data.truncated.sum())
        assert all(episode.episode_return == episode.length <= 9 for episode in batch.episodes)
        batches, played = batches + 1, played + batch.env_steps
        ended.update(episode.simulator for episode in batch.episodes)
        learner.learn(batch)
        return ended == {0, 1, 2, 3}

    until(learned, "episodes of all simulators", every=0)
    figures = json.loads(json.dumps(source.fields()))
    dropped = figures["trajectories_dropped"] - before["trajectories_dropped"]
    assert played == (2 * batches + dropped) * 14
    assert 0 <= figures["policy_lag_mean"] <= figures["policy_lag_max"] <= 10
    assert figures["actor_deaths"] == before["actor_deaths"]
    assert source.fields()["policy_lag_mean"] is None, "of what came since the last record"
    assert not source.exact


def test_actors_wait_for_a_learner_that_rests_and_their_waiting_is_counted(playing: Any) -> None:
    source, learner = playing
    learner.learn(next(source))
    until(lambda: all(ring.waiting_records == 3 for ring in rings(source)), "full queues")
    before, beats = source.fields()["queue_full_seconds"], [ring.beats for ring in rings(source)]
    until(lambda: source.fields()["queue_full_seconds"] > before + 0.2, "waiting to be counted")
    assert [ring.beats for ring in rings(source)] == beats, "nobody acts meanwhile"
    for _ in range(3):  # what waited, one of each in a batch
        next(source)
    assert 1 <= max(source._lags) <= 4


def test_a_source_that_is_told_to_stop_gives_what_was_played(playing: Any) -> None:
    source, _ = playing
    told: list[int] = []

    def alive(played: int) -> bool:
        told.append(played)
        return played > 0

    usual, source.alive = source.alive, alive
    batch = next(source)
    source.alive = usual
    assert batch.data is None
    assert batch.env_steps == told[-1] == 14


def test_what_is_older_than_the_bound_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table: versions in two queues, taken in turns, and which of them make up two batches. No process
    runs. After 10 updates version 11 is the newest; 7 is four updates old, and 6 is five."""
    monkeypatch.setattr(actor_processes.ActorProcesses, "start", lambda self, batches: None)
    with acted(queue=4, max_lag=4) as (source, _):
        source.load({"batches": 10, "first": torch.ones(4, dtype=torch.bool)})
        for ring, versions in zip(rings(source), ((7, 6, 10, 11), (5, 11, 6, 12)), strict=True):
            for version in versions:
                ring.put(trajectory(source._shape, version), [Episode(0, version, 1)], version)
        for taken, used, lags, dropped in (
            ([7, 5, 6, 11], [7, 11], [4, 0], 2),
            ([10, 6, 11], [10, 11], [2, 1], 3),
        ):
            batch = next(source)
            assert [episode.episode_return for episode in batch.episodes] == taken
            assert batch.env_steps == len(taken) * 14, "those of dropped trajectories were made, too"
            expected = [trajectory(source._shape, version).reward for version in used]
            assert torch.equal(batch.data.reward, torch.cat(expected, 1))
            figures = source.fields()
            assert figures["policy_lag_mean"] == sum(lags) / 2
            assert figures["policy_lag_max"] == 4
            assert figures["trajectories_dropped"] == dropped


def test_an_actor_that_dies_is_started_again_and_the_others_go_on(playing: Any) -> None:
    source, learner = playing
    for _ in range(5):
        learner.learn(next(source))
    assert [kind for kind, _ in source.events()] == ["actor began", "actor began"]
    victim = pids(source)[1]
    kill_actor_1(source, learner, victim)
    beats = rings(source)[1].beats
    until(lambda: learner.learn(next(source)) and rings(source)[1].beats > beats + 14, "its steps")
    assert source.fields()["actor_deaths"] == 1
    assert pids(source)[1] != victim


@pytest.mark.slow
def test_a_frozen_actor_holds_nobody_up_and_what_it_made_before_is_too_old() -> None:
    with acted(max_lag=3) as (source, learner):
        for _ in range(5):
            learner.learn(next(source))
        frozen = source._processes.actors[0]
        assert frozen.process is not None

        def dropped() -> bool:
            """It is frozen in the middle of a trajectory, if it was not just waiting or fetching."""
            os.kill(frozen.process.pid, signal.SIGSTOP)
            until(lambda: is_stopped(frozen.process.pid), "it to stop")
            for _ in range(8):  # of which at most two queued trajectories can be its own
                learner.learn(next(source))
            os.kill(frozen.process.pid, signal.SIGCONT)
            beats = frozen.ring.beats
            until(lambda: learner.learn(next(source)) and frozen.ring.beats > beats + 14, "it to go on")
            return bool(source.fields()["trajectories_dropped"])

        until(dropped, "a trajectory to be too old")
        assert source.fields()["actor_deaths"] == 0
        assert source.fields()["policy_lag_max"] <= 3


@pytest.mark.slow
def test_actors_that_hang_are_started_again_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_processes, "_SILENCE_SECONDS", 1.0)
    with acted() as (source, learner):
        for _ in range(5):
            learner.learn(next(source))
        source.events()
        stopped = pids(source)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        for actor in source._processes.actors:  # whatever they took until now on a machine that is busy
            actor.has_stepped, actor.longest_seconds = True, 0.0
        for _ in range(20):
            learner.learn(next(source))
        reported = [words for kind, words in source.events() if kind == "actor died"]
        assert any("actor 0 of replica 0" in words and "hung: no step for" in words for words in reported)
        assert any("actor 1 of replica 0" in words for words in reported)
        assert not set(stopped) & set(pids(source))


@pytest.mark.slow
def test_actors_that_cannot_begin_end_the_run_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_processes, "_MAX_DEATHS", 2)
    with acted(actors=1) as (source, _):
        broken = dataclasses.replace(AGENT, discount=float("nan"))
        object.__setattr__(broken, "torso", "nothing")
        source._processes.plan = dataclasses.replace(source._processes.plan, agent=broken)
        with pytest.raises(RunFailed, match="died 2 times without having sent any steps"):
            next(source)


def test_it_goes_on_with_new_games_and_with_any_number_of_actors() -> None:
    with acted() as (source, _):
        source.load({"batches": 5, "first": torch.ones(4, dtype=torch.bool)})
        state = source.state()
    run = run_of(actors=1)
    run.source.check_state(state)
    with acted(actors=1) as (other, _):
        other.load(state)
        assert other.state()["batches"] == 5
        assert other._processes.parameters.version == 0
        batch = next(other)
        assert other._processes.parameters.version == 6
        assert batch.data.first[0].all(), "new games"
        assert other.fields()["policy_lag_max"] == 0
        ended = pids(other)
    assert len(ended) == 1
    assert not any(map(psutil.pid_exists, ended))
    alone = run_of(actors=0)
    learner = build_learner(alone, 0, Replica)
    rollouts = open_only_source(alone, learner)
    rollouts.load(state)
    assert next(rollouts).data.first[0].all()
    back = rollouts.state()
    rollouts.close()
    with acted() as (third, _):
        third.load(back)
        assert third.state()["batches"] == 6
    with pytest.raises(Refusal, match="made with 4 simulators"):
        run_of(simulators=6).source.check_state(state)


def test_an_actor_counts_each_simulator_that_was_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of one message, which come from one process; and those of the actor's former processes."""
    restarting: Any = RestartingWorld()
    agent = A2C(hidden=8, steps=3)
    spec = restarting.open(3).spec
    parameters = published_tensors(agent.build(Context(spec, Replica, 0)))[0]
    files = [SharedMemoryFile.create(), SharedMemoryFile.create()]
    SharedParameters(files[0], len(parameters)).publish(parameters, 1)
    ring = TrajectoryRing(files[1], TrajectoryShape(spec, 3, 3, 0, {}), 2)
    ring.set_restarts(10)
    settings = ActorSettings(
        restarting,
        agent,
        simulators=3,
        first_simulator=0,
        global_first_simulator=0,
        total_simulators=3,
        seed=0,
        incarnation="second",
        random_env_steps=0,
        queue=2,
        parameters=(files[0].descriptor, len(parameters)),
        ring=files[1].descriptor,
    )
    with pytest.raises(EOFError):
        make_trajectories(settings)
    assert ring.waiting_records == 1
    assert ring.restarts == 10 + 3
    assert capsys.readouterr().err.splitlines() == ["b is started again", "c is started again"]
    for file in files:
        file.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "agent",
    [A2C(hidden=8, steps=5), PPO(hidden=8, steps=8, minibatches=2), PPO(hidden=8, steps=8, recurrent=4)],
    ids=["a2c", "ppo", "recurrent ppo"],
)
def test_agents_that_learn_from_rollouts_can_learn_from_it(agent: A2C | PPO) -> None:
    """A2C as if the steps were its own; PPO's ratios begin at the policy that acted."""
    with acted(learner=agent, env_steps=10_000, updates=None) as (source, learner):
        for number in range(4):
            batch = next(source)
            assert batch.data.behaviour.keys() == agent.requires.behaviour.keys()
            assert math.isfinite(float(learner.learn(batch).read_metrics()["loss"]))
            assert updates_of(learner) == agent.updates(number + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"simulators": 5}, "5 cannot be divided. Use --simulators 4"),
        (
            {"actors": 9},
            "9 actors have equal shares of the simulators, and 4 cannot be divided. Use --simulators 9",
        ),
        ({"learner": A2C(scale_rewards=True)}, "scale_rewards follows .* Use --actors 0"),
        (
            {"queue": 3, "max_lag": 2},
            "trajectories wait for up to 3 batches. Use --max-lag 3, or a smaller --queue",
        ),
        ({"queue": 2, "trajectories": 1, "max_lag": 3}, "up to 4 batches"),
        ({"trajectories": 1, "max_lag": 1}, "Use --max-lag 2, or more --trajectories"),
        (
            {"learner": PPO(recurrent=4), "trajectories": 1, "env_steps": 10_000, "updates": None},
            "a batch of 2 simulators into more minibatches than it has .* Use --trajectories 2",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        run_of(**changes).validate()


def test_batches_and_memory_are_planned_by_what_a_batch_holds() -> None:
    run = run_of(trajectories=4, env_steps=10_000)
    assert run.source.batches(run) == 10_000 // (4 * 2 * 7)
    assert run_of(actors=0, env_steps=10_000).source.batches(run) == 10_000 // (4 * 7)
    pong = altered(recipe("pong-impala"), actors=4)
    frames = 32 * 20 * 4 * 84 * 84
    assert pong.source.memory_bytes(pong) > 4 * 150 * 2**20 + 3 * frames
