"""Environments in a user's file or module: their names, and files that have moved."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from own_file import FILE
from resuming import play

from murmurate.api.loading import load
from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.recipes import recipe, recipe_of, stored
from murmurate.training.run_folder import new_folder, read_run, write_run
from murmurate.worlds import _own_env
from murmurate.worlds.gym import GymWorld
from murmurate.worlds.own import OwnWorld, absolute_name, world, world_name, world_of


def test_wrappers_are_kept(place: Path) -> None:
    simulators = world("env:own_envs.py:make_env").open(1, training=True)  # type: ignore[union-attr]
    simulators.reset(0)
    steps = [play(simulators, torch.tensor([t % 2])) for t in range(5)]
    assert [float(step.reward) for step in steps] == [3.0] * 5
    assert bool(steps[-1].truncated)
    assert steps[-1].episodes[0].episode_return == 15.0


@pytest.mark.parametrize(
    "given", ["own_envs.py:make_env", "./own_envs.py:make_env", "own_envs:Outer.Inner", "own_envs:OwnCart-v0"]
)
def test_a_name_holds_from_other_folders(given: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recipe_of(given, "spo-dqn")
    source, _, path = given.partition(":")
    expected = f"{place / 'own_envs.py'}:{path}" if source.endswith(".py") else given
    assert run.recipe == f"{'gym' if given.endswith('v0') else 'env'}:{expected}-spo-dqn"
    folder = place / "run"
    folder.mkdir()
    write_run(folder, run)
    gymnasium.registry.pop("OwnCart-v0", None)
    sys.modules.pop("own_envs", None)
    if str(place) in sys.path:
        sys.path.remove(str(place))
    monkeypatch.chdir("/")
    again = read_run(folder, recipe)
    assert again == run
    other = pickle.loads(pickle.dumps(again.world))
    assert other.open(2, training=True).reset(0).observation.shape == (2, 4)


def test_the_file_of_an_environment_is_not_taken_for_a_recipes(place: Path) -> None:
    run = recipe("env:own_envs.py:make_env-a2c")
    assert run.world.name == f"env:{place}/own_envs.py:make_env"
    assert recipe(run.recipe) == run


def test_the_nearest_name_in_a_module_is_offered(place: Path) -> None:
    with pytest.raises(Refusal, match=r"no class or function 'make_en'.*Did you mean 'own_envs:make_env'"):
        world_name("own_envs:make_en")


def test_names_of_all_kinds(place: Path) -> None:
    assert world_name("Acrobot-v1") == "gym:Acrobot-v1"
    assert world_name("cartpole") == "cartpole"
    assert world_name("gym:Acrobot-v1") == "gym:Acrobot-v1"
    assert world_name("gymnasium.envs:Acrobot-v1") == "gym:gymnasium.envs:Acrobot-v1"
    assert world_name("own_envs:make_env") == "env:own_envs:make_env"
    assert absolute_name("env:own_envs.py:make_env") == f"env:{place}/own_envs.py:make_env"
    assert world_of("Acrobot-v1") == GymWorld("Acrobot-v1")
    assert new_folder("env:/a/b-c/own envs.py:make_env-a2c").name.startswith("own-envs.py-make_env-a2c-2")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("env:own_envs.py:nothing", "the class or function 'nothing', and there is none in .*own_envs.py"),
        ("env:own_envs.py:make", r"none in .*own_envs.py. Did you mean 'make_env'\?"),
        ("env:own_env.py:make_env", "the file .*own_env.py, which is not there"),
        ("env:own_env:make_env", "the module 'own_env'.*PYTHONPATH"),
        ("env:make_env", "names no class or function"),
        ("env:unnamed:<lambda>", r"lambda.*murmurate.load\(folder, env=...\)"),
    ],
)
def test_what_is_not_there_is_refused(name: str, words: str, place: Path) -> None:
    with pytest.raises(Refusal, match=words):
        world(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", "is of type int, and it must be a gymnasium.Env"),
        ("forgets", "Env. Does the function return the environment"),
        ("fails", "ArithmeticError: no"),
        ("spaceless", "has no observation_space: set it in its class or its __init__"),
        ("actless", "has no action_space"),
    ],
)
def test_what_makes_no_environment_is_refused(name: str, words: str, place: Path) -> None:
    with pytest.raises(Refusal, match=words):
        recipe_of(f"own_envs.py:{name}", "a2c")


def test_a_file_that_is_imported_already_is_not_executed_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(place)
    module = importlib.import_module("own_envs")
    found = _own_env.find_callable(f"{place}/own_envs.py:make_env", "", "theirs")
    assert found == (module.make_env, "")
    assert "murmurate_file_own_envs" not in sys.modules


def test_a_script_is_named_by_its_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(place)  # as Python does for a script
    script = type(sys)("__main__")
    script.__file__ = str(place / "own_envs.py")
    exec(compile(FILE, script.__file__, "exec"), vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    made = world_of(script.make_env)
    assert made.name == f"env:{place}/own_envs.py:make_env"
    monkeypatch.delitem(_own_env._callables, made.target)  # type: ignore[attr-defined]
    assert made.open(1, training=True).reset(0).observation.shape == (1, 4)


def test_a_function_that_its_name_does_not_find_is_for_this_process_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(place)
    script = type(sys)("__main__")
    script.__file__ = str(place / "own_envs.py")
    exec(compile(FILE, script.__file__, "exec"), vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    wrapped = functools.wraps(script.make_env)(lambda: CartPoleEnv())
    assert world_of(wrapped).target == "unnamed:make_env"  # type: ignore[attr-defined]
    script.make_env = wrapped  # as by a decorator
    assert world_of(wrapped).target == f"{place}/own_envs.py:make_env"  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", ["own_envs.py", "own_envs"])
def test_a_script_without_a_guard_says_so(place: Path, source: str) -> None:
    with (place / "own_envs.py").open("a") as file:
        file.write("\nfrom murmurate.worlds.own import world_of\nworld_of(make_env)\n")
    with pytest.raises(Refusal, match=rf"{source} starts a run while it is loaded.*__main__"):
        world(f"env:{source}:make_env")


def test_a_folder_of_modules_is_stored_only_where_it_must(place: Path) -> None:
    assert world("env:own_envs:make_env").folder == str(place)  # type: ignore[union-attr]
    assert world("env:gymnasium.envs.classic_control:CartPoleEnv").folder == ""  # type: ignore[union-attr]
    assert os.path.isabs(world("env:own_envs.py:make_env").target)  # type: ignore[union-attr]


def test_a_file_that_has_moved_is_named_to_evaluate_report_export_and_resume(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--env", "own_envs.py:make_env", "--algorithm", "a2c", "--env-steps", "300"]
    assert main([*words, "--launcher", "inline", "--out", "run"]) == 0
    (place / "other").mkdir()
    for name in ("own_envs.py", "own_neighbour.py"):
        (place / name).rename(place / "other" / name)
    export = ["export", "run", "--to", "policy.safetensors"]
    for words in (["eval", "run"], ["report", "run"], ["resume", "run"], export):
        assert main(words) == 2
        assert "--env of murmurate resume, eval, report and export" in capsys.readouterr().err
    for words in (["eval", "run"], ["report", "run"], export):
        assert main([*words, "--env", "other/own_envs.py:make_env"]) == 0
    assert Path("policy.safetensors").exists()
    for verb in ("eval", "resume"):
        assert main([verb, "run", "--env", "Acrobot-v1"]) == 2
        assert "names no class or function" in capsys.readouterr().err
    # processes of their own find it by its new name, which the folder then stores
    moved = ["--env", "other/own_envs.py:make_env", "--launcher", "local"]
    assert main(["resume", "run", *moved, "--env-steps", "600"]) == 0
    assert f"env:{place / 'other' / 'own_envs.py'}:make_env-a2c" == stored(Path("run")).recipe
    assert main(["resume", "run", "--launcher", "inline", "--env-steps", "900"]) == 0
    assert json.loads(Path("run/summary.json").read_text())["env_steps"] >= 900


def test_a_resumed_run_finds_a_moved_module_from_any_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "--env", "own_envs.py:make_env", "--algorithm", "a2c", "--env-steps", "300"]
    assert main([*words, "--launcher", "inline", "--out", "run"]) == 0
    assert main(["resume", "run", "--env", "own_envs:make_env", "--env-steps", "600"]) == 0
    assert json.loads(Path("run/run.json").read_text())["world"]["folder"] == str(place)


@pytest.fixture
def twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two folders with files of the same names. ``twin_env`` imports ``twin_limit``, whose numbers differ."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folders = [tmp_path / "one", tmp_path / "two"]
    for limit, folder in enumerate(folders, 3):
        folder.mkdir()
        (folder / "twin_limit.py").write_text(f"LIMIT = {limit}\n")
        (folder / "twin_env.py").write_text(
            "import gymnasium\nimport twin_limit\n\n"
            "def make():\n    return gymnasium.make('CartPole-v1', max_episode_steps=twin_limit.LIMIT)\n"
        )
        (folder / "twin_whole.py").write_text(
            "import gymnasium\n\n"
            f"def make():\n    return gymnasium.make('CartPole-v1', max_episode_steps={limit})\n"
        )
    yield folders
    for name in [name for name in sys.modules if "twin_" in name]:
        del sys.modules[name]


def test_a_module_of_the_same_name_in_another_folder_is_no_substitute(twins: list[Path]) -> None:
    one, two = (OwnWorld("twin_whole:make", folder=str(folder)) for folder in twins)
    assert one.formats()
    with pytest.raises(Refusal, match=r"two/twin_whole.py, and .* imported .*one/twin_whole.py"):
        two.formats()
    shutil.copy(twins[0] / "twin_whole.py", twins[1] / "twin_whole.py")
    assert two.formats()  # of a copy nothing differs


def test_a_file_is_not_given_the_neighbour_of_another_file(twins: list[Path]) -> None:
    _own_env.find_callable(f"{twins[0]}/twin_env.py:make", "", "first")
    with pytest.raises(Refusal, match=r"second needs .*two/twin_limit.py, and .*one/twin_limit.py"):
        _own_env.find_callable(f"{twins[1]}/twin_env.py:make", "", "second")


def test_files_of_the_same_name_are_two_modules(twins: list[Path]) -> None:
    targets = [f"{folder}/twin_whole.py:make" for folder in twins]
    made = [_own_env.find_callable(target, "", "theirs")[0] for target in targets]
    assert [_own_env.target_of(function)[0] for function in made] == targets


def test_only_an_environment_of_ones_own_can_have_moved(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "cartpole-a2c", "--env-steps", "300", "--launcher", "inline", "--out", "run"]
    assert main(words) == 0
    before = Path("run/run.json").read_text()
    for words in (["resume", "run", "--env-steps", "600"], ["eval", "run"], ["report", "run"]):
        assert main([*words, "--env", "own_envs.py:make_env"]) == 2
        assert "cartpole was not made by a class or function of yours" in capsys.readouterr().err
    with pytest.raises(Refusal, match="was not made by a class or function of yours"):
        load("run", env="own_envs.py:make_env")
    assert Path("run/run.json").read_text() == before


def test_a_relative_path_means_the_same_in_a_process_of_its_own(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "placed.py").write_text(
        "import gymnasium\n\n"
        "class Placed(gymnasium.wrappers.TimeLimit):\n"
        "    def __init__(self):\n"
        "        with open('limit.txt') as file:\n"
        "            super().__init__(gymnasium.make('CartPole-v1'), int(file.read()))\n"
    )
    (place / "limit.txt").write_text("3")
    monkeypatch.chdir(place)
    made: Any = world_of("placed.py:Placed")
    simulators = dataclasses.replace(made, served=True).open(1, training=True)
    simulators.reset(0)
    for _ in range(3):
        simulators.send(torch.zeros(1, dtype=torch.int64))
        step = simulators.receive()
    simulators.close()
    assert step.truncated.all()
    assert (place / "limit.txt").exists()
