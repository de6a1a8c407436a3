"""The loop's own part: when it is over, and what it saves."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import a_run

from murmurate.agents.a2c import A2CAgent
from murmurate.errors import Refusal
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import NotFinite
from murmurate.spec import Batch, Outcome, Placement
from murmurate.strategies import strategies
from murmurate.training import checkpoint
from murmurate.training.loop import TrainingLoop
from murmurate.training.run import Run
from murmurate.training.worker_context import FINAL, Restored, WorkerContext, staging


def learn(
    run: Run, folder: Path, restored: list[Restored] | None = None, act: Any = None, **faults: Any
) -> list[TrainingLoop]:
    """Every replica's ``TrainingLoop`` after its ``run_to_end`` (or after ``act``), on a simulated fabric."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    run_state = RunState(run.replicas)
    run_state.open()
    fabric = SimulatedFabric(run.replicas, seed=run.seed, keep_log=False, **faults)

    def role(rank: int, member: Any) -> TrainingLoop:
        torch.set_num_threads(1)
        context = WorkerContext(
            rank, member, run_state, folder, time.monotonic(), 0.0, restored[rank] if restored else None
        )
        learning = TrainingLoop(run, context)
        (act or TrainingLoop.run_to_end)(learning)
        return learning

    return fabric.run([lambda member, rank=rank: role(rank, member) for rank in range(run.replicas)])  # type: ignore[misc]


# -- the end ---------------------------------------------------------------------------------------------


def test_updates_are_per_replica_and_env_steps_are_the_total(tmp_path: Path) -> None:
    run = a_run(updates=6)
    per_update = run.source.simulators * run.learner.steps
    for learning in learn(run, tmp_path / "a"):
        assert (learning.learner.clock, learning.env_steps) == (6, 6 * per_update)
    total = 7 * per_update  # an odd number of rollouts for two replicas: the fourth update of each passes it
    for learning in learn(a_run(updates=None, env_steps=total), tmp_path / "b"):
        assert learning.learner.clock == 4
    first, second = learn(a_run("gala", updates=None, env_steps=total), tmp_path / "c")
    assert total <= first.env_steps + second.env_steps <= total + per_update


def test_what_the_dead_have_made_counts_among_the_env_steps(tmp_path: Path) -> None:
    run = a_run(updates=None)
    per_update = run.source.simulators * run.learner.steps
    total = 20 * per_update
    run = dataclasses.replace(run, env_steps=total)
    survivor, dead = learn(run, tmp_path, crashes={1: 20})
    assert isinstance(dead, BaseException)
    of_the_dead = survivor.context.run_state.env_steps(1)
    assert 2 * per_update < of_the_dead < total // 2
    assert total <= survivor.env_steps + of_the_dead <= total + per_update


def test_whichever_end_comes_first(tmp_path: Path) -> None:
    for updates, env_steps, expected in ((2, 10**6, 2), (10**6, 3 * 2 * 24, 3)):
        run = a_run(updates=updates, env_steps=env_steps)
        assert [x.learner.clock for x in learn(run, tmp_path / str(updates))] == [expected] * 2


@pytest.mark.parametrize(("every", "told"), [(1e-9, [1, 2, 3, 4, 5, 6, 6]), (1e9, [6])])
def test_metrics_are_made_for_the_updates_that_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: float, told: list[int]
) -> None:
    """The last one is, once more, at the end."""
    made = []
    learn_as_ever = A2CAgent.learn

    def learns(self: A2CAgent, batch: Batch) -> Outcome:
        outcome = learn_as_ever(self, batch)
        return Outcome({**outcome.metrics, "loss": lambda: made.append(self.clock) or 0.5})

    monkeypatch.setattr(A2CAgent, "learn", learns)
    learn(a_run("solo", replicas=1, updates=6, record_every_seconds=every), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert made == told
    assert {line["loss"] for line in lines if "loss" in line} == {0.5}
    rates = [line["env_steps_per_second"] for line in lines if "env_steps_per_second" in line]
    assert len(rates) == len(set(told))  # the record at the end repeats another, without any time between
    assert min(rates) > 0


def test_what_happens_before_the_first_update_is_recorded_at_once(tmp_path: Path) -> None:
    """An actor dies, for example, while a replay is filled for the first batch."""
    recorded: list[list[str]] = []

    def wait_for_a_batch(loop: TrainingLoop) -> None:
        events = [("actor died", "actor 0 of replica 0 died")]
        loop.source.events = lambda: [events.pop()] if events else []  # type: ignore[method-assign]
        loop.source.alive(0)  # as a source calls it while it prepares a batch
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        recorded.append([json.loads(line)["event"] for line in lines])

    learn(a_run("solo", replicas=1), tmp_path, act=wait_for_a_batch)
    assert recorded == [["actor died"]]


class Transfer:
    """As of a donor that had answered three requests for checkpoints."""

    def __init__(self, loop: TrainingLoop) -> None:
        self.transferred = loop._state_to_transfer() | {"answered": 3}
        self.completed = False

    def receive(self) -> dict[str, Any]:
        return self.transferred

    def complete(self, transferred: dict[str, Any]) -> None:
        self.completed = transferred is self.transferred


def test_who_joins_does_not_answer_requests_that_the_donor_has_answered(tmp_path: Path) -> None:
    def join(loop: TrainingLoop) -> None:
        transfer = Transfer(loop)
        loop._join(transfer)  # type: ignore[arg-type]
        assert transfer.completed
        for requested in (3, 4):
            loop._serve_requests((False, requested, 0))
            assert staging(tmp_path, str(requested)).exists() == (requested == 4)

    (loop,) = learn(a_run("solo", replicas=1), tmp_path, act=join)
    assert isinstance(loop, TrainingLoop)


@pytest.mark.parametrize("strategy", ["local-sgd", "synchronous-elastic", "synchronous-gossip"])
def test_a_stop_within_a_round_that_takes_long_and_a_resume_there(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("murmurate.training.loop.BATCHES_TO_DECISION", 10)
    run = a_run(updates=20, record_every_seconds=1e9, simulators=1)
    run = dataclasses.replace(
        run,
        strategy=dataclasses.replace(strategies()[strategy](), period=13),
        learner=dataclasses.replace(run.learner, steps=1),
    )

    def stop_soon(loop: TrainingLoop) -> None:
        def after_a_batch() -> None:
            if loop.batches:
                loop.context.run_state.request_stop()

        loop.context.between_steps = after_a_batch  # type: ignore[method-assign]
        loop.run_to_end()

    assert [x.batches for x in learn(run, tmp_path / "a", act=stop_soon)] == [10, 10]
    folder = tmp_path / "a" / "checkpoints"
    checkpoint.commit(folder, staging(tmp_path / "a", FINAL), {"env_steps": 0, "seconds": 0.0, "replicas": 2})
    restored = [Restored.read(folder / "last", rank, rank) for rank in range(2)]
    resumed, whole = learn(run, tmp_path / "a", restored), learn(run, tmp_path / "b")
    for one, other in zip(resumed, whole, strict=True):
        assert one.batches == other.batches == 20
        assert torch.equal(one.learner.replica.params, other.learner.replica.params)


def test_a_run_that_was_over_stays_over(tmp_path: Path) -> None:
    learn(a_run(updates=6), tmp_path)
    checkpoint.commit(
        tmp_path / "checkpoints",
        staging(tmp_path, FINAL),
        {"env_steps": 0, "seconds": 0.0, "replicas": 2, "replica_env_steps": [144, 144]},
    )
    found = tmp_path / "checkpoints" / "last"
    restored = [Restored.read(found, rank, rank) for rank in range(2)]
    assert [x.learner.clock for x in learn(a_run(updates=6), tmp_path, restored)] == [6, 6]

    def only_an_event(loop: TrainingLoop) -> None:
        loop.recorder.event("actor began", "it plays")

    learn(a_run(updates=6), tmp_path, restored, act=only_an_event)
    event = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (event["env_steps"], event["updates"]) == (144, 6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"updates": 50, "env_steps": 4800}, 50),
        ({"updates": 50, "env_steps": 480}, 10),  # the end that comes first
        ({"updates": None, "env_steps": 4800}, 100),  # 2 replicas x 3 simulators x 8 steps
        ({"updates": None, "env_steps": 1}, 1),
        ({"updates": None, "minutes": 1.0}, None),
    ],
)
def test_the_schedule_is_as_long_as_the_run(fields: dict[str, Any], expected: int | None) -> None:
    assert a_run(**fields).planned_updates() == expected


_BAD: dict[str, Any] = {
    "replicas": 0, "simulators": 0, "updates": 0, "minutes": -1.0, "eval_episodes": 0, "seed": -1,
    "checkpoint_every_env_steps": 0, "probe_every_updates": -1, "record_every_seconds": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", _BAD)
def test_values_that_make_no_sense_are_refused_by_name(name: str) -> None:
    a_run().validate()
    with pytest.raises(Refusal, match=name):
        a_run(**{name: _BAD[name]}).validate()
    with pytest.raises(Refusal, match="device"):
        a_run(placement=Placement(devices=())).validate()


# -- what is saved ---------------------------------------------------------------------------------------


def test_a_replica_that_died_goes_on_from_a_peer_with_its_own_count_and_games(tmp_path: Path) -> None:
    learn(a_run(updates=6), tmp_path)
    checkpoint.commit(
        tmp_path / "checkpoints",
        staging(tmp_path, FINAL),
        {"env_steps": 144 + 48, "seconds": 0.0, "replicas": 2, "replica_env_steps": [144, 48]},
    )
    found = tmp_path / "checkpoints" / "last"
    mine, revived = Restored.read(found, 0, 0), Restored.read(found, 1, 0)
    assert (mine.is_own, mine.env_steps) == (True, 144)
    assert (revived.is_own, revived.env_steps) == (False, 48)

    seen: dict[int, Any] = {}

    def look(learning: TrainingLoop) -> None:
        seen[learning.context.rank] = (learning.source.state(), learning.learner.clock, learning.env_steps)
        learning.source.close()

    learn(a_run(), tmp_path, [mine, revived], act=look)
    (one, clock, steps), (other, clock_of_other, steps_of_other) = seen[0], seen[1]
    assert (clock, clock_of_other) == (6, 6)
    assert (steps, steps_of_other) == (144, 48)
    assert not torch.equal(one["observation"], other["observation"])
    assert not torch.equal(one["generator"], other["generator"])
    # nor the games with which the run began
    began: dict[int, Any] = {}
    learn(a_run(), tmp_path / "anew", act=lambda x: began.update({x.context.rank: x.source.state()}))
    assert not torch.equal(other["observation"], began[1]["observation"])
    assert not torch.equal(other["generator"], began[1]["generator"])


def test_episodes_that_no_record_told_of_are_told_after_a_resume(tmp_path: Path) -> None:
    learn(a_run(updates=6), tmp_path)
    state = checkpoint.read_part(staging(tmp_path, FINAL), 0)
    state["unreported"], state["returns"], state["probed"] = [[9.0, 9]], [7.0, 9.0], {"disagreement": 0.5}
    (again, _) = learn(a_run(), tmp_path, [Restored(state, 144, True)] * 2, act=lambda x: x.source.close())
    assert again.unreported == [[9.0, 9]]
    assert list(again.returns) == [7.0, 9.0]
    assert again.probed == {"disagreement": 0.5}


def test_synchronous_members_agree_on_a_request_that_comes_between_them(tmp_path: Path) -> None:
    outcomes = set()
    for case in range(12):
        answers: list[Any] = []

        def ask(learning: TrainingLoop, answers: list[Any] = answers, who: int = case % 2) -> None:
            if learning.context.rank == who:
                learning.context.run_state.request_checkpoint()
            answers.append(learning._agree_on_requests())
            learning.source.close()

        learn(a_run(seed=case // 2), tmp_path / str(case), act=ask)
        assert answers[0] == answers[1]
        outcomes.add(answers[0][1])
    assert outcomes == {0, 1}, "it should have come before both, and between them"


def test_nothing_that_is_not_finite_is_saved(tmp_path: Path) -> None:
    def spoil(learning: TrainingLoop) -> None:
        learning.learner.replicas["a2c"].params.data[7] = float("nan")
        learning.state()

    with pytest.raises(NotFinite, match="parameters of replica 'a2c' are not finite at its update 0"):
        learn(a_run("solo", replicas=1), tmp_path, act=spoil)
