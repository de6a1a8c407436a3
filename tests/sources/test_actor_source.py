"""Actors: their steps, flow control, the age of their parameters, and their death."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from murmurate.agents.dqn import DQN, DQNAgent
from murmurate.errors import RunFailed
from murmurate.fabric.processes.fork_server import fork_server
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Steps
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.sources import actor_processes
from murmurate.sources.actor import ActorLoop
from murmurate.sources.actor_agent import ActorSettings, published_tensors
from murmurate.sources.actor_processes import ActorPlan, ActorProcess
from murmurate.sources.actor_source import ActorSource
from murmurate.sources.replay_sampler import ReplaySampler
from murmurate.sources.shared_ring import SLOTS, ActorFailure, ActorRing, ActorStep, SharedParameters
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds.registry import world
from scripted import ScriptedSimulators
from sources.deaths import died_at_start, kill_actor_1
from waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.timeout(2 * DEADLINE_SECONDS)
CONFIG = ReplayConfig(capacity=2_000, learning_starts=64, samples_per_insert=4.0, publish_every=3)
AGENT = DQN(batch=16, n_step=2, exploration="ladder", epsilon=0.4, hidden=8)


@contextmanager
def acted(
    config: ReplayConfig = CONFIG, agent: DQN = AGENT, actors: int = 2
) -> Iterator[tuple[ActorSource, DQNAgent]]:
    cartpole = world("cartpole")
    spec = EnvSpec("CartPole-v1", (4,), torch.float32, actions=2)
    learner = agent.build(Context(spec, Replica, 0))
    plan = ActorPlan(cartpole, agent, actors, simulators=5, rank=0, replicas=1)
    replay = open_replay(config, spec, simulators=5, steps=agent.n_step, discount=0.99, seed=0)
    drawing = ReplaySampler(replay, config, agent.batch, torch.device("cpu"), lambda: 0.0)
    source = ActorSource(plan, spec, learner, drawing, seed=0)
    try:
        yield source, learner
    finally:
        source.close()


def pids(source: ActorSource) -> list[int]:
    return [actor.process.pid for actor in source._processes.actors if actor.process is not None]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclasses.dataclass
class Played:
    """What a learner of two actors saw in 150 updates.

    priorities: of the replay before the first update. errors: as the learner computes them then. bounds: the
    env steps and the draws until each batch. fields, state: once both actors wait for the learner. held:
    transitions in the replay then. ended: processes of the actors, after the source was closed.
    """

    priorities: torch.Tensor
    errors: torch.Tensor
    bounds: list[tuple[int, int]]
    fields: dict[str, Any]
    state: dict[str, Any]
    held: int
    ended: list[int]


@pytest.fixture(scope="module")
def session() -> Played:
    """One for several tests, because processes take a second to start."""
    config = dataclasses.replace(CONFIG, alpha=1.0, epsilon=0.0)
    with acted(config) as (source, learner):
        batch = next(source)
        replay = source.replay
        filled = len(replay)
        priorities = replay.sampler.tree.priorities[:filled].clone()
        columns = {name: replay.rows.column(name)[:filled].clone() for name in replay.rows.columns}
        with torch.no_grad():
            value = learner.net(columns["observation"]).gather(1, columns["action"][:, None])[:, 0]
            best = learner.net(columns["next_observation"]).max(1).values
        errors = (columns["reward"] + columns["discount"] * best - value).abs()
        played, bounds = 0, []
        for number in range(150):
            batch = next(source) if number else batch
            assert len(batch.data.keys) == 16
            batch.feedback(learner.learn(batch).priorities)
            played += batch.env_steps
            bounds.append((played, 16 * (number + 1)))
        until(lambda: all(actor.ring.waiting_records > SLOTS // 2 for actor in source._processes.actors))
        fields, state, held, ended = source.fields(), source.state(), len(replay), pids(source)
        store = state["replays"]["replay"]["store"]
        store["rows"] = store["rows"].clone()
    return Played(priorities, errors, bounds, fields, state, held, ended)


def test_actors_play_with_the_learners_parameters_and_are_held_back(session: Played) -> None:
    for played, drawn in session.bounds:
        assert drawn <= 4.0 * (played - 64)
        assert drawn > 4.0 * (played - 64 - 2 * 5) - 16
    fields = session.fields
    assert 0 <= fields["actor_lag_updates"] <= fields["actor_lag_updates_max"] < 150
    # newer parameters have come to the actors: no step is older than what may have waited, and some
    assert fields["actor_lag_updates"] <= 3 + 2 * (SLOTS + 2) * 5 * 4 / 16
    assert fields["actor_deaths"] == 0
    assert not any(alive(pid) for pid in session.ended)


def test_first_priorities_are_the_errors_that_the_actor_saw(session: Played) -> None:
    """Before the first update actor and learner have the same net, so the learner can check each."""
    assert len(session.errors) > 60
    torch.testing.assert_close(session.priorities, session.errors, rtol=1e-3, atol=1e-4)


def test_actors_that_die_or_hang_are_started_again_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with acted() as (source, learner):
        for _ in range(20):
            learner.learn(next(source))
        assert [kind for kind, _ in source.events()] == ["actor began", "actor began"]
        victim = pids(source)[1]
        kill_actor_1(source, learner, victim)
        assert source.fields()["actor_deaths"] == 1
        taken = source._processes.actors[1].ring
        before = int(taken._counters[1])
        until(lambda: learner.learn(next(source)) and int(taken._counters[1]) >= before + 10, "its steps")
        assert pids(source)[1] != victim

        monkeypatch.setattr(actor_processes, "_SILENCE_SECONDS", 1.0)
        stopped, hung = pids(source), ""
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        for actor in source._processes.actors:  # whatever they took until now on a machine that is busy
            actor.has_stepped, actor.longest_seconds = True, 0.0
        while not ("actor 0 of replica 0" in hung and "actor 1 of replica 0" in hung):
            learner.learn(next(source))
            hung += "".join(words for kind, words in source.events() if kind == "actor died")
        assert "hung: no step for" in hung
        assert not set(stopped) & set(pids(source))


@pytest.mark.parametrize("daemon", [False, True])  # whose actors are forked from a fork server, or are not
def test_actors_end_with_a_learner_that_is_killed(daemon: bool) -> None:
    """They hear the end of a pipe that only the learner holds."""
    read, write = os.pipe()

    def learn() -> None:
        torch.set_num_threads(1)
        with acted(actors=1) as (source, _):
            next(source)
            os.write(write, b" ".join(str(pid).encode() for pid in pids(source)) + b"\n")
            signal.pause()

    process = multiprocessing.get_context("fork").Process(target=learn, daemon=daemon)
    fork_server()
    process.start()
    result = [int(word) for word in os.read(read, 1000).split()]
    assert all(alive(pid) for pid in result)
    assert len(result) == 1
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    until(lambda: not any(alive(pid) for pid in result))


def test_no_transition_joins_the_steps_of_an_actor_and_of_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even where the last step of one that died comes after its successor was started. No process
    runs."""
    monkeypatch.setattr(actor_processes.ActorProcesses, "_spawn", lambda *arguments: None)
    flags = torch.zeros(5, dtype=torch.bool)
    with acted(dataclasses.replace(CONFIG, learning_starts=0), actors=1) as (source, _):
        ring = source._processes.actors[0].ring
        for incarnation, observed in ((0, 0.0), (0, 1.0), (1, 2.0), (1, 3.0)):
            seen = torch.full((5, 4), observed)
            step = Steps(seen, flags.long(), torch.ones(5), seen + 1.0, flags, flags)
            ring.put(ActorStep(step, [], version=1, incarnation=incarnation))
        source.alive = lambda played: not ring.waiting_records
        assert next(source).data is None
        assert len(source.replay) == 10
        rows = source.replay.rows
        assert (rows.column("next_observation") - rows.column("observation"))[:10].unique().tolist() == [2.0]
        assert rows.column("observation")[:10].unique().tolist() == [0.0, 2.0]


def test_actors_that_cannot_begin_end_the_run_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_processes, "_MAX_DEATHS", 2)
    monkeypatch.setattr(actor_processes, "_CHECK_SECONDS", 0.05)
    with acted(actors=1) as (source, _):
        source._processes._module = "no_such_module"
        with pytest.raises(RunFailed, match="died 2 times without having sent any steps"):
            next(source)


def test_an_actor_that_died_before_it_got_its_settings_can_be_replaced() -> None:
    process, memory_file = died_at_start(), SharedMemoryFile.create()
    ring: Any = None  # of no actor that ever stepped
    ActorProcess(0, 0, 1, memory_file, ring, ActorFailure(memory_file), process).kill()
    assert process.stdin is not None
    assert process.stdin.closed
    memory_file.close()


def test_an_environment_that_always_fails_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failing step is sent, so that the actor does not die without having sent any."""
    file = tmp_path / "crane.py"
    file.write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n\n\n"
        "class Crane(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        raise OSError('no licence')\n"
    )
    monkeypatch.setattr(actor_processes, "_CHECK_SECONDS", 0.05)
    with acted(actors=1) as (source, _):
        source._processes.plan = dataclasses.replace(source.plan, world=world(f"env:{file}:Crane"))
        named = r"actor 0 of replica 0: .*OSError in step: no licence.*\(crane.py:6 in step\). Mend the"
        with pytest.raises(RunFailed, match=named):
            next(source)
        assert [kind for kind, _ in source.events()] == ["actor began"]


def test_random_actions_are_those_of_the_runs_start(session: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a resumed run nor an actor that is started again repeats them."""
    started: list[int] = []
    real = actor_processes.ActorSettings

    def settings(**fields: Any) -> Any:
        started.append(fields["random_env_steps"])
        return real(**fields)

    monkeypatch.setattr(actor_processes, "ActorSettings", settings)
    played = int(session.state["played"])
    for already, state in ((0, None), (played, session.state)):
        with acted() as (source, _):
            source.plan = source._processes.plan = dataclasses.replace(
                source.plan, random_env_steps=played + 50
            )
            if state is not None:
                source.load(state)
            next(source)
        # actors of 2 and 3 of the 5 simulators
        assert sorted(started) == [(played + 50 - already) * size // 5 for size in (2, 3)]
        started.clear()


def test_it_goes_on_from_its_replay_with_new_games(session: Played) -> None:
    state = session.state
    with acted(actors=1) as (other, _):
        other.load(state)
        assert len(other.replay) == session.held
        assert not other.exact
        batch = next(other)
        assert batch.env_steps < 64  # nothing is begun anew but the games
    with acted(actors=1) as (third, _), pytest.raises(ValueError, match="4 simulators"):
        third.load({**state, "first": state["first"][:4]})


class RestartedAtTheReset(ScriptedSimulators):
    """Replaced two simulators at its first reset, and one in its second step; ends at the fourth."""

    def reset(self, seed: int) -> TimeStep:
        return dataclasses.replace(super().reset(seed), restarts=["b is started again"] * 2)

    def receive(self) -> TimeStep:
        if self._step == 3:
            raise EOFError
        return dataclasses.replace(super().receive(), restarts=["c is started again"] * (self._step == 2))


class RestartingWorld:
    def open(self, simulators: int, **options: Any) -> Any:
        return RestartedAtTheReset([[(1.0, "")]] * simulators)


@contextmanager
def ended_actor(config: DQN) -> Iterator[tuple[ActorLoop, ActorRing]]:
    """An actor whose simulators have ended, and its learner's end of the ring."""
    world: Any = RestartingWorld()
    spec = world.open(3).spec
    agent: Any = config.build(Context(spec, Replica, 0))
    parameters = torch.cat([x.flatten() for x in published_tensors(agent)])
    files = [SharedMemoryFile.create(), SharedMemoryFile.create()]
    SharedParameters(files[0], len(parameters)).publish(parameters, 1)
    reader = ActorRing(files[1], spec, 3)
    settings = ActorSettings(
        world,
        config,
        3,
        0,
        0,
        3,
        0,
        "first",
        0,
        64,
        (files[0].descriptor, len(parameters)),
        files[1].descriptor,
    )
    loop = ActorLoop(settings)
    with pytest.raises(EOFError):
        loop.run()
    yield loop, reader
    for file in files:
        file.close()


def test_an_actor_counts_and_tells_the_restarts_of_its_first_reset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted = []
    with ended_actor(AGENT) as (_, reader):
        while reader.waiting_records:
            counted.append(reader.oldest().restarts)
            reader.drop()
    assert counted == [2, 1, 0]
    assert capsys.readouterr().err.splitlines() == ["b is started again", "c is started again"]


class BuildsGraphs(DQN):
    """Its agent does not say that acting needs no gradient."""

    def build(self, context: Context) -> DQNAgent:
        agent = super().build(context)
        agent.act = functools.partial(DQNAgent.act.__wrapped__, agent)  # type: ignore[method-assign,attr-defined]
        return agent


def test_an_actor_builds_no_graph_whatever_its_agent_says() -> None:
    """What it sends would keep the graphs of all its steps."""
    with ended_actor(BuildsGraphs(**vars(AGENT))) as (loop, reader):
        assert reader.oldest().steps.action_value is not None
        assert not any(sent.requires_grad for slot in loop._ring._slots for sent in slot.values())
