"""From a Run to a run folder: what is taken back and what never is, and how a run ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import murmurate
from murmurate.cli.main import main
from murmurate.errors import Refusal, RunFailed
from murmurate.evaluation import games
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch.inline import Inline
from murmurate.recipes import recipe, stored
from murmurate.record.reader import read_metrics
from murmurate.replica.vector import Replica
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.training import interrupts, session, summary
from murmurate.training.coordinator import Coordinator
from murmurate.training.members import build_learner
from murmurate.training.run_folder import claim, locked
from short_runs import SHORT, altered, content, refused, train


def test_a_refusal_after_the_run_began_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=2, simulators=2)

    def unreadable(*_: object, **__: object) -> None:
        raise Refusal("the part cannot be read.")

    monkeypatch.setattr(session, "summarize", unreadable)
    with pytest.raises(RunFailed, match=r"cannot be read\. The checkpoint at .* is kept"):
        train(run, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()


def test_ranks_that_are_started_again_delete_no_checkpoint_that_is_damaged(tmp_path: Path) -> None:
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=2, simulators=2)
    train(run, folder := tmp_path / "run")
    for part in folder.glob("checkpoints/*/replica-0.safetensors"):
        part.write_bytes(b"bad")
    (folder / "summary.json").unlink()  # it had not finished
    before = content(folder)

    class Restarted(Inline):
        def adopt(self) -> Any:
            return SimpleNamespace(leads=True, earlier_folder=lambda: folder, refuse=lambda: None)

    with pytest.raises(Refusal, match="is corrupt or missing"):
        session.train(run, tmp_path / "other", Restarted(), stored)
    assert content(folder) == before


def test_ranks_do_not_evaluate_a_finished_run_again(tmp_path: Path) -> None:
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=2, simulators=2, eval_episodes=1)
    train(run, folder := tmp_path / "run")
    before, told = content(folder), list[Path]()

    class Leading(Inline):
        def adopt(self) -> Any:
            return SimpleNamespace(leads=True, earlier_folder=lambda: None, finished=told.append)

    assert session.train(run, folder, Leading(), stored, goes_on=True).code == 0
    assert session.resume(folder, lambda name: Leading(), stored).code == 0
    assert told == [folder, folder]
    assert content(folder) == before


def test_one_command_begins_a_run_goes_on_with_it_and_leaves_it_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["train", "cartpole-a2c", *SHORT, "--continue", "--out", str(folder)]
    claim(folder)  # as a run that is killed at once leaves it
    with pytest.warns(UserWarning, match="had saved no checkpoint; it is now"):
        assert main(words) == 0
    capsys.readouterr()
    (left,) = tmp_path.glob("cut-off-run-*")
    assert not (left / "run.json").exists()

    before = content(folder)
    assert main(words) == 0
    assert "has finished" in capsys.readouterr().out
    assert content(folder) == before

    (folder / "summary.json").unlink()  # as a run that was killed after its checkpoint leaves it
    assert main(words) == 0
    assert main([*words, "--updates", "4"]) == 0
    events = [record.get("event") for record in read_metrics(folder / "metrics.jsonl")]
    assert events.count("resumed") == 2
    result = murmurate.train(
        "cartpole-a2c", updates=4, simulators=2, launcher="inline", eval_episodes=1, out=folder, resume=True,
        quiet=True,
    )  # fmt: skip
    assert result.summary["updates"] == 4
    assert events == [record.get("event") for record in read_metrics(folder / "metrics.jsonl")]


def test_what_a_command_does_not_go_on_with_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=2, simulators=2, eval_episodes=1)
    train(run, folder := tmp_path / "run")
    capsys.readouterr()
    words = ["train", "cartpole-a2c", *SHORT, "--continue"]
    assert "Name the folder: --out" in refused(capsys, *words)
    assert "Leave out --continue" in refused(capsys, *words, "--seeds", "0-1", "--out", folder)
    before = content(folder)
    said = refused(capsys, *words, "--out", folder, "--agent.learning-rate", "0.5")
    assert "--agent.learning-rate cannot change on resume" in said
    with locked(folder):
        said = refused(capsys, *words, "--updates", "4", "--out", folder)
    assert "another process is training" in said
    assert content(folder) == before
    claim(begun := tmp_path / "begun")
    with locked(begun):
        assert "another process is training" in refused(capsys, *words, "--out", begun)
    with monkeypatch.context() as working:
        working.chdir(begun)
        assert "cannot be renamed" in refused(capsys, *words, "--out", ".")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    assert "holds no run" in refused(capsys, *words, "--out", tmp_path / "theirs")
    (tmp_path / "theirs" / "checkpoints").mkdir()
    (tmp_path / "theirs" / "checkpoints" / "model.pt").touch()
    assert "holds no run" in refused(capsys, *words, "--out", tmp_path / "theirs")
    (tmp_path / "theirs" / "file").unlink()
    assert "holds no run" in refused(capsys, *words, "--out", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "checkpoints" / "model.pt").exists(), "another program's is not renamed"
    for name in (["train"], ["simulate"], words):
        said = refused(capsys, name[0], "cartpole-a2c", *name[2:], "--out", tmp_path / ("a" * 300))
        assert "cannot be made: File name too long. Choose another folder with --out" in said


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError, SystemExit])
def test_what_ends_a_run_before_it_begins_leaves_no_folder(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object) -> None:
        raise error

    monkeypatch.setattr(session, "record_data", burst)
    with pytest.raises(error):
        train(altered(recipe("cartpole-a2c"), launcher="inline", updates=2, simulators=2), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fails", "code", "exit_reason"), [(True, 1, "failed: it burst"), (False, 143, "interrupted")]
)
def test_a_signal_while_the_run_is_closed_takes_away_nothing_that_is_to_be_said(
    fails: bool, code: int, exit_reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch elastic sends it for a death, which rank 0 may have seen already."""
    close, commit = Coordinator.close, Coordinator.commit_final
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def burst(self: Coordinator) -> None:
        commit(self)
        if fails:
            raise RunFailed("it burst")

    def closing(self: Coordinator) -> None:
        signal.raise_signal(signal.SIGTERM)
        close(self)

    monkeypatch.setattr(Coordinator, "commit_final", burst)
    monkeypatch.setattr(Coordinator, "close", closing)
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=2, simulators=2)
    finish = train(run, tmp_path / "run")
    assert finish.code == code
    assert json.loads((tmp_path / "run/summary.json").read_text())["exit"] == exit_reason
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_an_evaluation_raises_at_the_end_fails_the_run_with_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def burst(*_: object, **__: object) -> None:
        raise ArithmeticError("it burst")

    monkeypatch.setattr(summary, "figures", burst)
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--out", str(folder)]) == 1
    reason = "failed: training is complete, and its evaluation raised ArithmeticError: it burst"
    assert f"murmurate: {reason}. The checkpoint at" in capsys.readouterr().err
    assert json.loads((folder / "summary.json").read_text())["exit"] == reason
    monkeypatch.undo()
    assert main(["eval", str(folder), "--episodes", "1"]) == 0


def test_a_run_that_failed_has_a_summary_even_if_its_evaluation_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where an environment has broken for good."""
    commit = Coordinator.commit_final

    def burst(self: Coordinator) -> None:
        commit(self)
        raise RunFailed("it burst")

    def broken(*_: object, **__: object) -> None:
        raise RunFailed("the environment does not start")

    monkeypatch.setattr(Coordinator, "commit_final", burst)
    monkeypatch.setattr(summary, "figures", broken)
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=2, simulators=2)
    finish = train(run, tmp_path / "run")
    assert finish.code == 1
    written = json.loads((tmp_path / "run/summary.json").read_text())
    assert (written["exit"], written["eval_return_mean"]) == ("failed: it burst", None)


def test_a_third_interrupt_says_that_the_checkpoint_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first stops the run, the second stops it at once, and the third cuts the cleanup."""
    commit = Coordinator.commit_final

    def interrupted(self: Coordinator) -> None:
        commit(self)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Coordinator, "commit_final", interrupted)
    monkeypatch.setattr(Coordinator, "close", lambda self: signal.raise_signal(signal.SIGINT))
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--out", str(folder)]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("murmurate: interrupted. The checkpoint at ")
    assert last.endswith(f"is kept: murmurate resume {folder}")


@pytest.mark.parametrize("twice", [False, True])
def test_an_interrupt_cuts_only_the_evaluation(
    twice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = summary.write_json

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def interrupted_again(path: Path, facts: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)
        write(path, facts)

    monkeypatch.setattr(games, "evaluate", interrupted)
    if twice:
        monkeypatch.setattr(summary, "write_json", interrupted_again)
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--out", str(folder)]) == 130
    *_, begins, cut, after = capsys.readouterr().out.splitlines()
    assert begins == "evaluating 1 game; Ctrl-C skips"
    assert cut == "Training is complete; only its evaluation was cut"
    assert after.endswith(f"next: murmurate eval {folder}")
    assert json.loads((folder / "summary.json").read_text())["exit"] == "interrupted"


@pytest.mark.parametrize(
    ("name", "replicas", "title"),
    [
        ("cartpole-a2c", 1, "cartpole-a2c · 1 replica"),
        ("cartpole-a2c", 2, "cartpole-a2c · all-reduce · 2 replicas"),
        ("cartpole-hsa2c", 1, "cartpole-hsa2c · dpsgd · 1 replica"),
    ],
)
def test_a_run_is_titled_by_its_strategy_if_it_has_several_members(
    name: str, replicas: int, title: str
) -> None:
    assert altered(recipe(name), replicas=replicas).title == title


def test_a_signal_is_recorded_by_its_name() -> None:
    class Stopped:
        interrupted, signal, why = False, 0, ""

        def stop(self, why: str) -> None:
            self.why = why

    stopped = Stopped()
    with interrupts.signals_restored(), interrupts.signals(stopped):
        signal.raise_signal(signal.SIGINT)
    assert stopped.why == "SIGINT"


def test_schedules_span_the_run_also_where_all_replicas_count_together() -> None:
    for strategy, end in ((GALA(), 25), (Hogwild(), 100)):
        run = altered(
            recipe("cartpole-a2c"), strategy=strategy, replicas=4, simulators=1, env_steps=4 * 8 * 25
        )
        learner = build_learner(run, 0, Replica)
        (replica,) = learner.replicas.values()
        assert replica.schedule is not None
        assert replica.schedule(end) == pytest.approx(run.learner.learning_rate_end)
        assert replica.schedule(end - 1) > replica.schedule(end)


def test_no_member_waits_for_a_peer_that_has_finished() -> None:
    memory_file, run_state = SharedMemoryFile.create(), RunState(2)
    run_state.open()
    channel = ProcessFabric(memory_file, run_state, 0).channel("x", torch.zeros(3))
    assert not channel.wait_newer([1], [0], deadline_seconds=0.01)
    run_state.mark_finished(1)
    assert channel.wait_newer([1], [0], deadline_seconds=0.01)


def test_views_that_came_loose_are_found_at_the_first_loss() -> None:
    module = torch.nn.Linear(2, 1)
    replica = Replica("r", module, lambda p: torch.optim.SGD(p, lr=0.1))
    module.weight.data = module.weight.data.clone()
    with pytest.raises(RuntimeError, match="weight"):
        replica.descend(module(torch.ones(1, 2)).sum())
