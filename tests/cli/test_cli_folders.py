"""The command line on folders and machines that lack what it needs: refused, with nothing changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from murmurate.cli.main import main
from murmurate.cli.result_verbs import WORLD_PLACES
from murmurate.errors import Refusal
from murmurate.recipes import pairs, recipe
from murmurate.record.stored import seal
from murmurate.training import checkpoint
from murmurate.training.data_record import places
from murmurate.worlds.registry import families
from short_runs import SHORT, content, refused

# -- where the data are ----------------------------------------------------------------------------------


def test_eval_takes_the_places_of_every_world() -> None:
    """They are written out in ``result_verbs``, because reading worlds would slow the command line."""
    of_worlds = {world: name for name, (world, _) in pairs().items()}
    of_algorithms = {algorithm: name for name, (_, algorithm) in pairs().items()}
    # a recipe of each algorithm, and on each world but those that have the fields of their family's first
    alike = {world for names in families().values() for world in names[1:]}
    recipes = {*(name for world, name in of_worlds.items() if world not in alike), *of_algorithms.values()}
    names = {field for name in recipes for field, _ in places(recipe(name).world)}
    assert names == {*WORLD_PLACES, "skip_bad"}


def test_a_run_in_simulators_has_no_places(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--world.path cannot be given for the world cartpole: it has no such fields"
    assert words in refused(capsys, "eval", run_folder, "--world.path", "x")


# -- refusals of a folder --------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["resume", "eval", "report"])
def test_a_folder_without_a_run_is_refused(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{tmp_path} holds no run" in refused(capsys, verb, tmp_path)
    assert f"There is no folder {tmp_path / 'nowhere'};" in refused(capsys, verb, tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["resume", "eval", "report"])
def test_a_study_is_not_taken_for_a_run(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.json").write_text("{}")
    others = [tmp_path / "other"] if verb == "report" else []  # alone it has a page of its own
    assert f"such as {tmp_path / 'trial-0000'}" in refused(capsys, verb, tmp_path, *others)


def test_a_folder_with_a_space_is_quoted_in_what_to_type(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "a run")
    line = refused(capsys, "train", "cartpole-a2c", "--env-steps", "9", "--out", folder)
    assert f"Go on with it: murmurate resume '{folder}'; or" in line


def test_a_comparison_leaves_the_runs_own_page_alone(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    assert main(["report", str(run_folder)]) == 0
    own = (run_folder / "report.html").read_bytes()
    assert main(["report", str(run_folder), str(shutil.copytree(run_folder, tmp_path / "other"))]) == 0
    assert capsys.readouterr().out.split()[-1] == "comparison.html"
    assert [path.name for path in there.iterdir()] == ["comparison.html"]
    assert (run_folder / "report.html").read_bytes() == own


def test_a_run_that_is_named_again_counts_once(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run", f"{run_folder}/", "./run"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == ["run/report.html"]  # the page of one run
    assert said.err == "murmurate: left out 2 runs that were named before, so that each counts once\n"

    sweep = tmp_path / "sweep"
    for seed in (0, 1):
        shutil.copytree(run_folder, sweep / f"seed-{seed}")
    (sweep / "sweep.json").write_text(json.dumps(seal({"seeds": [0, 1]}, "sweep.json")))
    (tmp_path / "link").symlink_to(sweep / "seed-1")
    assert main(["report", "sweep", "sweep/seed-0", "link", "sweep/", "--out", "page.html"]) == 0
    assert "left out 4 runs" in capsys.readouterr().err
    page = (tmp_path / "page.html").read_text()
    data = json.loads(
        page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    )
    assert len(data["runs"]) == 2
    for verb in ("resume", "eval"):
        line = refused(capsys, verb, sweep)
        assert f"{sweep} is a sweep over seeds" in line
        assert str(sweep / "seed-0") in line


@pytest.mark.parametrize("verb", ["resume", "eval", "report"])
def test_a_folder_of_other_programs_is_no_run_and_nothing_is_to_be_removed(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "theirs")
    (tmp_path / "out").symlink_to("/")
    line = refused(capsys, verb, tmp_path)
    assert f"{tmp_path} holds no run: it has no run.json" in line
    assert "emove" not in line
    os.mkfifo(tmp_path / "run.json")
    assert "holds no run" in refused(capsys, verb, tmp_path)


def test_report_refuses_a_pipe_in_a_run_folder(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(run_folder / "theirs")
    assert "theirs is neither a file nor a folder" in refused(capsys, "report", run_folder)


# -- output that fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["pipe", "/dev/full"])
def test_a_run_whose_output_fails_goes_on_to_its_end(output: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if output == "pipe":
        reader, stdout = os.pipe()
        os.close(reader)
    elif Path(output).exists():
        stdout = os.open(output, os.O_WRONLY)
    else:
        pytest.skip(f"there is no {output} here")
    command = [sys.executable, "-m", "murmurate", "train", "cartpole-gala", *SHORT, "--out", str(folder)]
    try:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(stdout)
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("murmurate: warning: Nothing more is shown")
    assert done.returncode == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit"] == "finished"
    assert summary["eval_return_mean"] is not None


@pytest.mark.parametrize("verb", ["resume", "eval"])
@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"recipe": 5}', '{"recipe": "cartpole-gala"}', "\x00"]
)
def test_a_foreign_run_file_is_refused(
    text: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(text)
    assert "was not written by murmurate" in refused(capsys, verb, tmp_path)
    assert content(tmp_path) == {"run.json": text.encode()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replicas": "three"}, "does not fit this version of murmurate (replicas is 'three')"),
        ({"agent": {"steps": 1.5}}, "(steps is 1.5)"),
        ({"agent": {"learning_rate": "fast"}}, "(learning_rate is 'fast')"),
        ({"double_buffer": 1}, "(double_buffer is 1)"),
        ({"agent": 7}, "does not fit this version"),
        ({"recipe": "pnog-gala"}, "Did you mean 'pong'?"),
        ({"strategy": {"name": "gaal"}}, "Did you mean 'gala'?"),
        ({"replicas": 0}, "replicas is 0"),
    ],
)
def test_a_run_file_that_does_not_fit_is_refused(
    changes: dict[str, Any], words: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder / "run.json"
    stored = json.loads(path.read_text())
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(stored[name], dict)
        stored[name] = {**stored[name], **value} if both else value
    path.write_text(json.dumps(seal(stored, "run.json")))
    before = content(run_folder)
    assert words in refused(capsys, "resume", run_folder)
    assert content(run_folder) == before


def test_a_run_without_a_checkpoint_is_refused(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_folder / "checkpoints")
    before = content(run_folder)
    for verb in ("resume", "eval"):
        line = refused(capsys, verb, run_folder)
        assert "holds no checkpoint" in line
        assert "murmurate train" in line
    assert "leave out --best" in refused(capsys, "eval", run_folder, "--best")
    assert content(run_folder) == before


def test_a_corrupt_checkpoint_falls_back_and_two_are_refused(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(run_folder), "--updates", "4"]) == 0
    capsys.readouterr()
    checkpoints = run_folder / "checkpoints"
    steps_before = checkpoint.read_manifest(checkpoints / "previous")["env_steps"]
    (checkpoints / "last" / "replica-1.safetensors").write_bytes(b"noise")
    with pytest.warns(UserWarning, match=r"replica-1\.safetensors is corrupt or missing\. Going on from"):
        assert main(["resume", str(run_folder), "--updates", "4"]) == 0
    assert f"resumed at {steps_before:,} env steps" in capsys.readouterr().out

    (checkpoints / "last" / "replica-1.safetensors").write_bytes(b"noise")
    (checkpoints / "previous" / "state.json").write_text("{")
    before = content(run_folder)
    assert "evaluate or export that one with --best" in refused(capsys, "resume", run_folder)
    assert content(run_folder) == before
    shutil.rmtree(checkpoints / "best")
    before = content(run_folder)
    line = refused(capsys, "resume", run_folder)
    assert "There is no other to fall back to: start again with murmurate train" in line
    assert content(run_folder) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--agent.hidden", "32"), "belongs to another network"),
        (("--replicas", "3"), "was made with 4 replicas"),
        (("--simulators", "5"), "made with 2 simulators a learner and the run has 5. Use --simulators 2"),
        (("--agent.optimizer", "adam"), "does not fit this run"),
        (("--nothing", "5"), "no field called 'nothing'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    options: tuple[str, ...], words: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run_folder)
    assert words in refused(capsys, "resume", run_folder, *options)
    assert content(run_folder) == before


def test_a_role_that_refuses_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Refusal("not here. Go elsewhere.")

    monkeypatch.setattr("murmurate.launch.inline.work", refuse)
    for existed in (False, True):
        folder = tmp_path / "run"
        if existed:
            folder.mkdir()
        assert main(["train", "cartpole-gala", *SHORT, "--out", str(folder)]) == 2
        assert capsys.readouterr().err == "murmurate: not here. Go elsewhere.\n"
        assert folder.exists() == existed
        assert not existed or list(folder.iterdir()) == []
