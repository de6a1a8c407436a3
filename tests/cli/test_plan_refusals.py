"""What ``murmurate plan`` refuses before it measures anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import Capture

from murmurate.cli.main import main
from murmurate.mapping import measure


@pytest.fixture(autouse=True)
def in_a_folder_without_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_time_to_a_target_needs_a_target(capsys: Capture) -> None:
    assert main(["plan", "cartpole-a2c", "--objective", "time"]) == 2
    assert "--target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "remedy"),
    [("time", "--target RETURN"), ("energy", "--watts 6"), ("memory --hosts 2", "leave out --hosts")],
)
def test_what_an_objective_lacks_is_refused_before_anything_is_measured(
    objective: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no profile yet
    monkeypatch.setattr(measure, "add_variants", lambda *_: pytest.fail("measured"))
    assert main(["plan", "cartpole-a2c", "--objective", *objective.split()]) == 2
    assert remedy in capsys.readouterr().err


def test_a_recipe_whose_batches_are_not_modelled_is_refused(capsys: Capture) -> None:
    assert main(["plan", "cartpole-service-dqn"]) == 2
    message = capsys.readouterr().err
    assert "cartpole-service-dqn learns from transitions, whose costs are not modelled" in message
    assert "measuring" not in message


def test_a_launcher_of_one_process_is_refused(capsys: Capture) -> None:
    """What is predicted computes at the same time, and has actors."""
    assert main(["plan", "cartpole-impala", "--launcher", "inline"]) == 2
    told = (
        "a plan is of replicas that compute at the same time, and those of the inline launcher do not: leave "
    )
    assert told + "out --launcher" in capsys.readouterr().err


def test_a_check_for_another_machine_is_refused_before_anything_is_measured(capsys: Capture) -> None:
    assert main(["plan", "cartpole-a2c", "--check", "--on", "nowhere.json"]) == 2
    assert "--check runs the candidates here" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused_before_anything_is_measured(capsys: Capture) -> None:
    assert main(["plan", "cartpole-a2c", "--placement.devices", "cuda:99"]) == 2
    captured = capsys.readouterr()
    assert "Use --placement.devices cpu" in captured.err or "there is no cuda:99" in captured.err
    assert "measuring" not in captured.err


def test_a_strategy_that_cannot_begin_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(measure, "add_variants", lambda *_: pytest.fail("measured"))
    words = ["--strategy", "gala", "--strategy.topology", "moebius", "--profile"]
    assert main(["plan", "cartpole-a2c", *words]) == 2
    assert "There is no topology called 'moebius'" in capsys.readouterr().err


def test_outputs_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(measure, "add_variants", lambda *_: pytest.fail("measured"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    words = ["plan", "cartpole-a2c", "--profile"]
    assert main([*words, "--page", str(tmp_path / "no" / "plan.html")]) == 2
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err
    assert main([*words, "--page", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in capsys.readouterr().err
    assert main([*words, "--page", str(tmp_path / "full" / "p.json"), "--on", f"{tmp_path}/full/p.json"]) == 2
    assert "which holds the measured costs" in capsys.readouterr().err
    assert main([*words, "--apply", "--out", str(tmp_path / "full")]) == 2
    assert "full is not empty and holds no run" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    assert main([*words, "--out", str(tmp_path / "new")]) == 2
    assert "Add --apply" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_training_that_cannot_start_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(measure, "add_variants", lambda *_: pytest.fail("measured"))
    words = ["plan", "cartpole-a2c", "--profile", "--apply", "--launcher"]
    assert main([*words, "torchrun"]) == 2
    assert "torchrun starts the replicas itself. Leave out --apply" in capsys.readouterr().err
    assert main([*words, "local", "--compression", "int8", "--strategy", "gala"]) == 2
    assert "where vectors are not sent. Leave it out" in capsys.readouterr().err
