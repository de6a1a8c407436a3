"""From a Run to a run folder: what is taken back and what never is, and what a resume may change."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import murmurate
from murmurate.cli.main import main
from murmurate.cli.run_verbs import report_end
from murmurate.errors import Refusal, RunFailed
from murmurate.evaluation import games
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch.inline import Inline
from murmurate.launch.torchrun import Torchrun
from murmurate.recipes import recipe, stored
from murmurate.record.reader import read_metrics
from murmurate.record.runs import open_run
from murmurate.record.stored import write_json
from murmurate.replica.vector import Replica
from murmurate.sources.rollouts import RolloutSource
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.training import checkpoint, coordinator, interrupts, session, summary
from murmurate.training.coordinator import Coordinator
from murmurate.training.members import build_learner
from murmurate.training.resumed_settings import reached_end
from murmurate.training.run_folder import claim, locked
from murmurate.training.worker_context import FINAL, staging
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
    (left,) = tmp_path.glob("run-cut-off-*")
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


def test_advised_commands_name_a_folder_with_a_space_as_a_shell_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run"
    begin = ["train", "cartpole-a2c", *SHORT, "--out", str(folder)]
    assert main(begin) == 0
    capsys.readouterr()
    command = f"murmurate resume '{folder}'"
    assert f"Go on with it: {command};" in refused(capsys, *begin)
    assert checkpoint.kept_sentence(folder).endswith(f"is kept: {command}")
    assert f"--initial '{folder}' begins with" in refused(capsys, "resume", folder, "--seed", "5")
    assert f"See: {command} --help" in refused(capsys, "resume", folder, "--nonsense", "5")
    env = f"env:{tmp_path}/an env.py:make-a2c"
    (tmp_path / "an env.py").write_text("import gymnasium\nmake = lambda: gymnasium.make('CartPole-v1')\n")
    said = refused(capsys, "train", env, "--nonsense", "5")
    assert f"See: murmurate train '{env}' --help" in said
    (folder / "run.json").write_text((folder / "run.json").read_text().replace("cartpole", "acrobot"))
    assert f"as in {command} --env-steps" in refused(capsys, "resume", folder)


def test_a_launcher_says_what_the_command_to_resume_with_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Torchrun.command_prefix == "torchrun ... -m "
    monkeypatch.setattr(Inline, "command_prefix", "srun ")
    folder = tmp_path / "run"
    finish = train(altered(recipe("cartpole-a2c"), launcher="inline", updates=1, eval_episodes=1), folder)
    capsys.readouterr()
    assert report_end(finish) == 0
    assert "next: murmurate report" in capsys.readouterr().out
    for code, how, before in ((130, "interrupted", "next"), (1, "failed: no room", "is kept")):
        report_end(dataclasses.replace(finish, code=code, summary={**(finish.summary or {}), "exit": how}))
        said = capsys.readouterr()
        assert f"{before}: srun murmurate resume {folder}\n" in said.out + said.err


def test_a_resume_with_other_settings_keeps_the_commands_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a run"
    begin = ["train", "cartpole-a2c", *SHORT, "--out", str(folder)]
    longer = ["resume", str(folder), "--updates", "3"]
    for words in (begin, longer, longer):
        monkeypatch.setattr("sys.argv", ["murmurate", *words])
        assert main(words) == 0
    repeats = open_run(folder).command
    assert repeats == (f"{shlex.join(['murmurate', *begin])}\n{shlex.join(['murmurate', *longer])}", True)


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


def test_resume_refuses_an_end_that_is_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--updates", "3", "--out", str(folder)]) == 0
    capsys.readouterr()
    before = content(folder)
    steps = json.loads((folder / "summary.json").read_text())["env_steps"]
    said = refused(capsys, "resume", folder, "--env-steps", steps)
    assert said == f"{folder} is already at {steps} env steps; give more than that."
    assert "is already at 3 updates; give more" in refused(capsys, "resume", folder, "--updates", 2)
    minutes = checkpoint.read_manifest(folder / "checkpoints" / "last")["seconds"] / 60
    said = refused(capsys, "resume", folder, "--minutes", minutes)
    assert said == f"{folder} is already at {round(minutes, 3)} minutes; give more than that."
    assert content(folder) == before
    assert main(["resume", str(folder), "--env-steps", str(steps + 1), "--updates", "none"]) == 0


def test_a_run_that_has_reached_its_end_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--updates", "3", "--out", str(folder)]) == 0
    before = content(folder)
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"{folder} holds a run that has finished: it has reached its end of 3 updates. To go on" in said
    assert "give more with --updates (in Python: updates)" in said
    assert content(folder) == before
    summary = json.loads((folder / "summary.json").read_text())
    assert murmurate.resume(folder, quiet=True).summary.items() <= summary.items()
    assert content(folder) == before
    write_json(folder / "summary.json", {"exit": "finished", "eval_return_mean": None})
    assert main(["resume", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["eval_return_mean"] is not None
    before = content(folder)
    capsys.readouterr()
    assert main(["resume", str(folder), "--placement.threads", "2"]) == 0
    assert "holds a run" not in capsys.readouterr().out, "with other settings it is evaluated anew"
    assert json.loads((folder / "summary.json").read_text())["updates"] == 3
    assert (folder / "run.json").read_bytes() != before["run.json"]


def test_the_end_of_a_run_is_told_in_its_unit(tmp_path: Path) -> None:
    run = altered(recipe("cartpole-a2c"), launcher="inline", updates=4, simulators=2, eval_episodes=1)
    newest = train(run, tmp_path / "run").folder / "checkpoints" / "last"
    for end, goal, words in (("env_steps", 10, "10 env steps"), ("minutes", 0.0001, "0.0001 minutes")):
        said = reached_end(altered(run, updates=None, **{end: goal}), newest)
        option = end.replace("_", "-")
        assert said == (
            f"it has reached its end of {words}. To go on, give more with --{option} (in Python: {end})"
        )
        assert reached_end(altered(run, updates=None, **{end: 10**6}), newest) == ""


def test_env_steps_of_a_replica_that_died_are_part_of_the_end_that_is_past(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    options = ("--strategy", "gala", "--replicas", "2", "--out", str(folder))
    assert main(["train", "cartpole-a2c", *SHORT, *options]) == 0
    last = folder / "checkpoints" / "last"
    manifest = checkpoint.read_manifest(last)
    del manifest["parts"]["replica-1.safetensors"]
    checkpoint.write_json(last / "state.json", {**manifest, "living": [0], "dead": [1]})
    capsys.readouterr()
    steps = manifest["env_steps"]
    said = refused(capsys, "resume", folder, "--env-steps", steps - 1)
    assert said == f"{folder} is already at {steps} env steps; give more than that."


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_resume_that_is_stopped_before_its_replicas_begin_keeps_the_counts(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--updates", "3", "--out", str(folder)]) == 0
    before = json.loads((folder / "summary.json").read_text())
    fabric = SimpleNamespace(run=interrupted)
    monkeypatch.setattr("murmurate.launch.inline.SimulatedFabric", lambda *_, **__: fabric)
    monkeypatch.setattr("murmurate.launch.local.WorkerProcesses.start", interrupted)
    words = ["resume", str(folder), "--updates", "9", "--env-steps", "none", "--launcher", launcher]
    assert main(words) == 130
    after = json.loads((folder / "summary.json").read_text())
    assert [after[name] for name in ("env_steps", "updates")] == [before["env_steps"], 3]
    assert after["env_steps_per_second"] == 0
    (resumed,) = [
        event for event in read_metrics(folder / "metrics.jsonl") if event.get("event") == "resumed"
    ]
    assert [resumed[name] for name in ("env_steps", "updates")] == [before["env_steps"], 3]


def test_a_resume_whose_member_cannot_load_its_part_changes_nothing_that_is_settled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert main(["train", "cartpole-a2c", *SHORT, "--out", str(folder)]) == 0
    before = content(folder)

    def misfit(*_: object) -> None:
        raise ValueError("the simulators are of another version")

    with monkeypatch.context() as patch:
        patch.setattr(RolloutSource, "load", misfit)
        assert main(["resume", str(folder), "--updates", "4"]) == 2
    assert "does not fit this run (the simulators are of another version)" in capsys.readouterr().err
    after = content(folder)
    assert all(after[name] == before[name] for name in ("run.json", "summary.json"))


def test_resume_refuses_another_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "strategy cannot change on resume" in refused(capsys, "resume", tmp_path, "--strategy", "gala")


@pytest.mark.parametrize(
    ("field", "value"),
    [("agent.learning-rate", "1e-4"), ("double-buffer", "true"), ("strategy.topology", "complete")],
)
def test_resume_refuses_to_change_what_was_learned_with(
    run_folder: Path, capsys: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    capsys.readouterr()
    before = content(run_folder)
    said = refused(capsys, "resume", run_folder, f"--{field}", value)
    assert f"--{field} cannot change on resume" in said
    assert f"--initial {run_folder} begins with what it has learned" in said
    assert content(run_folder) == before


REPLAY = (
    *(
        "--replay.capacity",
        "500",
        "--replay.learning-starts",
        "50",
        "--simulators",
        "2",
        "--agent.batch",
        "8",
    ),
    *("--env-steps", "none", "--launcher", "inline", "--eval-episodes", "1"),
    *("--record-every-seconds", "1e-9"),
)


@pytest.mark.parametrize(
    ("strategy", "replicas", "exact"), [("gala", 2, False), ("gala", 1, True), ("all-reduce", 2, True)]
)
def test_asynchronous_members_do_not_resume_exactly(
    tmp_path: Path, strategy: str, replicas: int, exact: bool
) -> None:
    words = ["--strategy", strategy, "--replicas", str(replicas), "--updates", "2", "--launcher", "inline"]
    words += ["--simulators", "1", "--eval-episodes", "1", "--out", str(tmp_path / "run")]
    assert main(["train", "cartpole-gala", *words]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resume_exact"] == exact


def test_a_replica_that_is_dead_at_the_end_does_not_resume_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Coordinator.commit_final

    def without_a_part(self: Coordinator) -> None:
        (staging(self.folder, FINAL) / "replica-1.safetensors").unlink()
        commit(self)

    monkeypatch.setattr(Coordinator, "commit_final", without_a_part)
    words = ["--strategy", "all-reduce", "--replicas", "2", *SHORT, "--out", str(tmp_path / "run")]
    assert main(["train", "cartpole-gala", *words]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resume_exact"] is False


def test_a_signal_is_recorded_by_its_name() -> None:
    class Stopped:
        interrupted, signal, why = False, 0, ""

        def stop(self, why: str) -> None:
            self.why = why

    stopped = Stopped()
    with interrupts.signals_restored(), interrupts.signals(stopped):
        signal.raise_signal(signal.SIGINT)
    assert stopped.why == "SIGINT"


@pytest.mark.parametrize("saved", [True, False])
def test_resume_may_say_again_whether_the_replay_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    """What the last checkpoint holds is gone on from; what the next one holds follows the new word. Nobody
    claims that a run that went on with an empty replay is what it would have been."""

    def held() -> bool:
        return (folder / "checkpoints" / "last" / "replay-0.safetensors").exists()

    def summary() -> dict[str, Any]:
        read: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return read

    folder = tmp_path / "run"
    begin = ["train", "cartpole-dqn", *REPLAY, "--updates", "20", "--replay.saved", str(saved)]
    assert main([*begin, "--out", str(folder)]) == 0
    assert held() == saved
    capsys.readouterr()
    said = refused(capsys, "resume", folder, "--replay.saved", str(not saved), "--replay.alpha", "0.5")
    assert said.startswith("--replay.alpha cannot change on resume")
    assert held() == saved
    assert main(["resume", str(folder), "--replay.saved", str(not saved), "--updates", "40"]) == 0
    assert held() == (not saved)
    assert json.loads((folder / "run.json").read_text())["replay"]["saved"] is (not saved)
    assert not summary()["resume_exact"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    count = {line["updates"]: line["replay_transitions"] for line in lines if "replay_transitions" in line}
    assert (count[21] >= count[20]) == saved  # with what was there, or from nothing
    assert main(["resume", str(folder), "--updates", "50"]) == 0
    assert held() == (not saved)
    assert summary()["resume_exact"] == (not saved)


def test_a_replay_in_files_is_the_one_in_memory_and_may_move(tmp_path: Path) -> None:
    def losses(name: str) -> dict[int, float]:
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return {line["updates"]: line["loss"] for line in lines if "loss" in line}

    ways = {"memory": ([], []), "files": (["--replay.folder", str(tmp_path / "one")], ["--replay.folder"])}
    for name, (begin, move) in ways.items():
        words = ["train", "cartpole-dqn", *REPLAY, *begin, "--updates", "20", "--out", str(tmp_path / name)]
        assert main(words) == 0
        moved = [*move, str(tmp_path / "other")] if move else []
        assert main(["resume", str(tmp_path / name), "--updates", "40", *moved]) == 0
    assert losses("memory") == losses("files")
    assert len(losses("files")) == 40
    for folder in ("one", "other"):
        assert (tmp_path / folder / "replica-0" / "transitions.bin").stat().st_size >= 500 * 32


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


def test_a_checkpoint_that_hangs_is_given_up_and_another_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dataclasses.replace(recipe("cartpole-gala"), replicas=2, checkpoint_every_env_steps=100)
    claim(tmp_path / "run")
    run_state = RunState(2)
    run_state.open()
    watcher = Coordinator(run, tmp_path / "run", run_state, started_at=0.0)
    run_state.advance(0, 150, 1)
    watcher.poll()
    assert run_state.checkpoint_requested == 1
    run_state.mark_saved(0, 1)
    run_state.advance(0, 250, 2)
    watcher.poll()
    assert run_state.checkpoint_requested == 1  # replica 1 still has time
    monkeypatch.setattr(coordinator, "_CHECKPOINT_DEADLINE_SECONDS", -1.0)
    watcher.poll()
    assert run_state.checkpoint_requested == 2
    assert [e["event"] for e in watcher.events] == ["warning"]
    watcher.close()


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


_DROPS = """
import torch
from torch import nn

class Drops(nn.Sequential):
    out_features = 8

    def __init__(self, spec, hidden):
        super().__init__(nn.Linear(spec.observation_shape[0], 8), nn.Dropout(0.5))

    def forward(self, observation):
        if torch.is_grad_enabled():
            open(__file__ + ".seeds", "a").write(f"{torch.initial_seed()}\\n")
        return super().forward(observation)
"""


class _Stop:
    def on_checkpoint(self, folder: Path) -> str:
        return murmurate.STOP


def test_the_masks_of_dropout_are_the_replicas_own_and_a_resumed_run_goes_on_with_them(
    tmp_path: Path,
) -> None:
    net = tmp_path / "drops.py"
    net.write_text(_DROPS)

    def run(name: str, **options: Any) -> Path:
        settings: dict[str, Any] = {
            "launcher": "inline", "updates": 8, "simulators": 2, "eval_episodes": 1, "quiet": True,
            "agent": {"torso": f"{net}:Drops"}, "checkpoint_every_env_steps": 40,
        }  # fmt: skip
        murmurate.train("cartpole-a2c", out=tmp_path / name, **settings | options)
        return tmp_path / name

    def parameters(folder: Path) -> dict[str, torch.Tensor]:
        state = checkpoint.read_part(folder / "checkpoints" / "last", 0)
        assert state["updates"] == 8
        return state["replicas"]["a2c"]["replica"]["params"]

    state_before = torch.get_rng_state()
    whole = parameters(run("whole"))
    assert torch.equal(torch.get_rng_state(), state_before)
    stopped = run("stopped", callbacks=[_Stop()])
    assert checkpoint.updates(stopped / "checkpoints" / "last", 0) < 8
    torch.rand(3)
    murmurate.resume(stopped, quiet=True)
    resumed = parameters(stopped)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    seeds = net.with_name("drops.py.seeds")
    seeds.unlink()
    run("two", replicas=2, strategy="all-reduce")
    run("other", replicas=2, strategy="all-reduce", seed=1)
    assert len(set(seeds.read_text().split())) == 2 * 2 * 8
