"""Modules that are not installed: ``--import``, MURMURATE_IMPORT, and recipes from a file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from murmurate import plugins
from murmurate.cli.main import main
from short_runs import refused

PLUGINS = Path(__file__).parents[1] / "conformance" / "plugins"
SHORT = ["--replicas", "2", "--launcher", "inline", "--simulators", "2", "--env-steps", "640"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a strategy and an agent with its recipe, each in a file."""
    for name in ("post_local_sgd", "two_nets"):
        shutil.copy(PLUGINS / f"{name}.py", tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)  # of another test
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(plugins.IMPORTS, "")
    before = set(sys.modules)
    plugins.modules.cache_clear()
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("post_local_sgd", "two_nets", "broken", "plain"):
            del sys.modules[name]
    plugins.modules.cache_clear()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own."""
    monkeypatch.setenv(plugins.IMPORTS, "")
    for name in ("post_local_sgd", "two_nets"):
        sys.modules.pop(name, None)
    plugins.modules.cache_clear()


def test_a_run_of_files_is_resumed_evaluated_and_reported_from_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "two_nets.py:cartpole", "--import", "post_local_sgd", "--strategy", "post-local-sgd"]
    assert main([*words, *SHORT, "--out", "run"]) == 0
    stored = json.loads((folder / "run" / "run.json").read_text())
    assert stored["imports"] == [str(folder / "post_local_sgd.py"), str(folder / "two_nets.py")]
    assert stored["recipe"] == "cartpole-two-nets"
    monkeypatch.chdir("/")
    run = str(folder / "run")
    for verb in (["resume", run, "--env-steps", "960"], ["eval", run], ["report", run]):
        forget(monkeypatch)
        assert main(verb) == 0


def test_the_command_of_a_run_names_what_the_variable_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(plugins.IMPORTS, "post_local_sgd")
    words = ["train", "cartpole-a2c", "--strategy", "post-local-sgd", *SHORT, "--out", "run"]
    monkeypatch.setattr(sys, "argv", ["murmurate", *words])
    assert main(words) == 0
    repeat = ["env", "MURMURATE_IMPORT=post_local_sgd", "murmurate", *words]
    assert json.loads((folder / "run" / "run.json").read_text())["command"] == repeat
    forget(monkeypatch)
    longer = ["resume", "run", "--env-steps", "960"]
    monkeypatch.setattr(sys, "argv", ["murmurate", *longer])
    assert main(longer) == 0
    lines = json.loads((folder / "run" / "run.json").read_text())["command"]
    assert lines == f"{shlex.join(repeat)}\nmurmurate resume run --env-steps 960", (
        "the folder names the module"
    )


@pytest.mark.parametrize("way", ["option", "option with =", "variable"])
def test_what_a_module_adds_is_listed(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"option": ["--import", "two_nets"], "option with =": ["--import=two_nets.py"], "variable": []}[
        way
    ]
    if way == "variable":
        monkeypatch.setenv(plugins.IMPORTS, "two_nets")
        monkeypatch.syspath_prepend(os.getcwd())
        plugins.modules.cache_clear()
    assert main([*given, "list", "agents", "--json"]) == 0
    assert "two-nets" in {row["name"] for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("list --import nowhere", "nowhere cannot be imported (there is no such module)"),
        ("list --import nowhere.module", "nowhere.module cannot be imported (there is no such module)"),
        ("list --import broken.py", "broken.py cannot be imported (ZeroDivisionError: division by zero)"),
        ("list --import broken.py", "Correct line 1 of "),
        ("list --import", "--import names a module or a file"),
        ("train nowhere.py", "there is no file nowhere.py with a recipe"),
        ("train plain.py", "plain.py holds no recipe: it needs ALGORITHM"),
        (
            "train two_nets.py",
            "two_nets.py names no WORLDS: say on which it shall run, as in two_nets.py:cartpole",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused(
    words: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "plain.py").write_text("")
    assert sentence in refused(capsys, *words.split())


def test_a_recipe_of_a_name_that_is_taken_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "two_nets.py").read_text()
    (folder / "two_nets.py").write_text(text.replace('ALGORITHM = "two-nets"', 'ALGORITHM = "a2c"'))
    said = refused(capsys, "train", "two_nets.py:cartpole")
    assert "ALGORITHM in" in said
    assert "is 'a2c', as in murmurate.recipes.a2c: choose another name" in said


@pytest.mark.parametrize(
    ("file", "old", "new", "kind"),
    [
        ("post_local_sgd", '"post-local-sgd"', '"gala"', "strategies are called 'gala'"),
        ("two_nets", 'ALGORITHM = "two-nets"', 'ALGORITHM = "a2c"', "recipes are called 'a2c'"),
        ("two_nets", "ALGORITHM =", "TORSOS = {'mlp': net}\nALGORITHM =", "torsos are called 'mlp'"),
        (
            "two_nets",
            "ALGORITHM =",
            "def names(): return ['cartpole']\ndef world(name): return None\nALGORITHM =",
            "worlds are called 'cartpole'",
        ),
    ],
    ids=["strategy", "recipe", "torso", "world"],
)
def test_an_imported_part_takes_the_name_of_no_other(
    file: str, old: str, new: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else one of them would be trained under the name of the other."""
    text = (folder / f"{file}.py").read_text()
    assert old in text
    (folder / f"{file}.py").write_text(text.replace(old, new))
    words = ["train", "cartpole-a2c", "--strategy", "gala", "--agent.torso", "mlp", "--import", file]
    said = refused(capsys, *words, *SHORT, "--out", "run")
    assert f"two {kind}, that of murmurate." in said
    assert f" and that of {file}" in said
    assert not (folder / "run").exists()


def test_each_field_of_a_strategy_has_a_default(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a name alone cannot stand for the strategy."""
    text = (folder / "post_local_sgd.py").read_text().replace("switch: NonNegativeInt = 4", "switch: int")
    (folder / "post_local_sgd.py").write_text(text)
    for words in (["list", "strategies"], ["train", "cartpole-a2c", "--strategy", "post-local-sgd", *SHORT]):
        said = refused(capsys, *words, "--import", "post_local_sgd.py")
        assert "the field switch of the strategy 'post-local-sgd'" in said
        assert "has no default: give it one" in said


def test_a_file_may_be_imported_under_two_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a package that is installed, and by its path."""
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("")
    (folder / "post_local_sgd.py").rename(folder / "mine" / "own_sgd.py")
    monkeypatch.syspath_prepend(str(folder))
    words = ["train", "cartpole-a2c", "--strategy", "post-local-sgd", "--import", "mine.own_sgd"]
    assert main([*words, "--import", "mine/own_sgd.py", *SHORT, "--out", "run"]) == 0


@pytest.mark.slow
def test_processes_of_the_run_find_the_classes(folder: Path) -> None:
    words = [sys.executable, "-m", "murmurate", "train", "two_nets.py:cartpole", "--replicas", "2"]
    more = ["--import", "post_local_sgd", "--strategy", "post-local-sgd", "--env-steps", "640"]
    ended = subprocess.run([*words, *more], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_commands_of_a_sweep_import_what_it_needs(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["cartpole-a2c", "--import", "post_local_sgd.py", "--strategy", "post-local-sgd", *SHORT]
    assert main(["train", *words, "--seeds", "0", "--eval-episodes", "1", "--out", "sweep"]) == 0
    command = json.loads((folder / "sweep" / "sweep.json").read_text())["command"]
    assert "--import" in command
    assert "post_local_sgd.py" in command
