"""The loop's own part: when it is over, what it saves, and the launcher's side of checkpoints."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from murmurate.agents.a2c import A2CAgent
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.recipes import recipe
from murmurate.replica.vector import NotFinite
from murmurate.spec import Batch, Outcome, Placement
from murmurate.strategies import strategies
from murmurate.training import checkpoint
from murmurate.training.checkpoint import write_part
from murmurate.training.coordinator import Coordinator
from murmurate.training.loop import TrainingLoop
from murmurate.training.run import Run
from murmurate.training.worker_context import FINAL, FINAL_REQUEST, Restored, Resume, WorkerContext, staging
from short_runs import altered


def a_run(strategy: str = "all-reduce", **fields: Any) -> Run:
    settings: dict[str, Any] = {
        "strategy": strategies()[strategy](), "replicas": 2, "simulators": 3, "env_steps": None, "updates": 6,
        "stop_at_return": None, "record_every_seconds": 1e-9,
    }  # fmt: skip
    return altered(recipe("cartpole-gala"), **{**settings, **fields})


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


# -- the launcher's side ---------------------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path: Path) -> Any:
    (tmp_path / "checkpoints").mkdir()
    run_state = RunState(2)
    run_state.open()
    made = Coordinator(a_run("gala", checkpoint_every_env_steps=100), tmp_path, run_state, time.monotonic())
    yield made
    made.close()


def _part(coordinator: Coordinator, name: str, rank: int, steps: int) -> None:
    write_part(staging(coordinator.folder, name), rank, {"env_steps": steps, "x": torch.ones(1) * steps})


@pytest.mark.parametrize("survivor", ["centre", "replica"])
def test_what_no_run_could_be_resumed_from_is_not_committed(survivor: str, tmp_path: Path) -> None:
    """All replicas, or the centre, die while a checkpoint is being written."""
    (tmp_path / "checkpoints").mkdir()
    run_state = RunState(2)
    run_state.open()
    run = a_run("parameter-server", replicas=1, checkpoint_every_env_steps=100)
    coordinator = Coordinator(run, tmp_path, run_state, time.monotonic())
    run_state.advance(0, 110, 11)
    coordinator.poll()
    rank, other = (1, 0) if survivor == "centre" else (0, 1)
    for name in ("1", FINAL):
        _part(coordinator, name, rank, 110)
    run_state.mark_saved(rank, 1)
    run_state.mark_dead(other)
    coordinator.poll()
    assert not coordinator.commit_final()
    assert not (coordinator.checkpoints / "last").exists()
    _part(coordinator, FINAL, other, 110)
    assert coordinator.commit_final()
    coordinator.close()


def test_a_checkpoint_is_asked_for_when_due_and_committed_when_whole(coordinator: Coordinator) -> None:
    run_state, last = coordinator.run_state, coordinator.checkpoints / "last"
    run_state.advance(0, 60, 6)
    coordinator.poll()
    assert run_state.checkpoint_requested == 0
    run_state.advance(1, 50, 5)
    coordinator.poll()
    assert run_state.checkpoint_requested == 1
    _part(coordinator, "1", 0, 70)
    run_state.mark_saved(0, 1)
    coordinator.poll()
    assert not last.exists(), "one part is missing"
    _part(coordinator, "1", 1, 50)
    run_state.mark_saved(1, 1)
    run_state.advance(0, 99, 9)  # further on by now
    coordinator.poll()
    manifest = checkpoint.read_manifest(last)
    # what was saved counts, not how far they have come since
    assert (manifest["env_steps"], manifest["replica_env_steps"]) == (120, [70, 50])
    coordinator.poll()
    assert run_state.checkpoint_requested == 1, "the next one is due at 200"


def test_a_dead_replica_holds_no_checkpoint_up_and_keeps_its_count(coordinator: Coordinator) -> None:
    run_state = coordinator.run_state
    run_state.advance(0, 70, 7)
    run_state.advance(1, 50, 5)
    coordinator.poll()
    _part(coordinator, "1", 0, 80)
    run_state.mark_saved(0, 1)
    coordinator.died(1, "SIGKILL")
    coordinator.died(1, "LookupError: gone", "LookupError: gone")  # started again, and not let in yet
    coordinator.poll()
    manifest = checkpoint.read_manifest(coordinator.checkpoints / "last")
    assert (manifest["replica_env_steps"], manifest["dead"], manifest["living"]) == ([80, 50], [1], [0])
    assert [(e["event"], e.get("error")) for e in coordinator.events] == [
        ("died", None),
        ("died", "LookupError: gone"),
        ("checkpoint", None),
    ]
    lines = [json.loads(line) for line in (coordinator.folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["updates"] for line in lines if line.get("event") == "died"} == {7}  # the most of a replica


def test_one_that_ended_before_it_was_asked_takes_part_with_its_last_state(coordinator: Coordinator) -> None:
    run_state = coordinator.run_state
    run_state.advance(0, 70, 7)
    run_state.advance(1, 50, 5)
    coordinator.poll()
    _part(coordinator, FINAL, 1, 50)
    run_state.mark_saved(1, FINAL_REQUEST)
    _part(coordinator, "1", 0, 80)
    run_state.mark_saved(0, 1)
    coordinator.poll()
    last = coordinator.checkpoints / "last"
    assert checkpoint.parts(last) == [0, 1]
    assert checkpoint.read_part(last, 1)["x"].item() == 50
    # and its part is still there for the end
    _part(coordinator, FINAL, 0, 90)
    assert coordinator.commit_final()
    assert checkpoint.read_manifest(last)["replica_env_steps"] == [90, 50]


def test_a_checkpoint_asked_for_when_all_had_ended_is_the_final_one(coordinator: Coordinator) -> None:
    run_state = coordinator.run_state
    run_state.advance(0, 70, 7)
    run_state.advance(1, 50, 5)
    coordinator.poll()
    assert run_state.checkpoint_requested == 1
    for rank, steps in ((0, 70), (1, 50)):
        _part(coordinator, FINAL, rank, steps)
        run_state.mark_saved(rank, FINAL_REQUEST)
    coordinator.poll()
    assert not (coordinator.checkpoints / "last").exists()
    assert coordinator.commit_final()
    assert checkpoint.read_manifest(coordinator.checkpoints / "last")["env_steps"] == 120


def test_parts_of_a_checkpoint_that_was_never_whole_are_cleared_at_the_next_start(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    _part(coordinator, "3", 0, 1)
    again = Coordinator(coordinator.run, tmp_path, coordinator.run_state, time.monotonic())
    assert list((tmp_path / "checkpoints").iterdir()) == []
    again.close()


def test_a_best_checkpoint_that_was_set_aside_is_back_at_the_next_start(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / ".old-best").mkdir()
    Coordinator(coordinator.run, tmp_path, coordinator.run_state, time.monotonic()).close()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["best"]


def test_after_a_resume_the_next_checkpoint_is_due_where_it_would_have_been(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    run_state = RunState(2)
    run_state.open()
    resume = Resume(tmp_path / "last", {0: 0, 1: 1}, {"env_steps": 250, "best": None}, 3.0)
    run = a_run("gala", checkpoint_every_env_steps=100)
    coordinator = Coordinator(run, tmp_path, run_state, time.monotonic(), resume)
    assert coordinator.recorder.seconds >= 3.0
    run_state.advance(0, 260, 26)
    coordinator.poll()
    assert run_state.checkpoint_requested == 0
    run_state.advance(0, 300, 30)
    coordinator.poll()
    assert run_state.checkpoint_requested == 1
    coordinator.close()


def test_a_disk_that_takes_no_event_files_is_a_failure_and_closing_is_not(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(coordinator.tensorboard, "feed", full)
    monkeypatch.setattr(coordinator.tensorboard, "close", full)
    with pytest.raises(RunFailed, match="is full"):
        coordinator.poll()
    coordinator.close()


def test_a_stop_counts_also_while_members_end_for_a_new_epoch(coordinator: Coordinator) -> None:
    coordinator.run_state.request_stop()
    coordinator.stop("a callback has had enough")
    coordinator.stop("another reason")
    assert coordinator.stopped_because == "a callback has had enough"
