"""A file of the user's own that changes after a run began."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from murmurate import plugins
from murmurate.agents.mbpo import MBPO
from murmurate.api.loading import load
from murmurate.cli.main import main
from murmurate.recipes import recipe, stored
from murmurate.training.host import versions
from murmurate.training.own_files import changed, differing, digests
from murmurate.training.run_folder import write_run
from murmurate.tuning.run_process import changed_files
from murmurate.tuning.sweep import Sweep

FILE = """
import gymnasium

def make_env():
    return gymnasium.make("CartPole-v1", max_episode_steps=6)
"""
STRATEGY = """
from dataclasses import dataclass
from typing import ClassVar

from murmurate.strategies.solo import Solo

@dataclass
class Alone(Solo):
    name: ClassVar[str] = "their-alone"
"""
OUT = ["--algorithm", "a2c", "--launcher", "inline", "--env-steps", "200", "--eval-episodes", "1", "--out"]
WARNING = r"my_env\.py has changed since the run in .* began"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "my_env.py"
    path.write_text(FILE)
    yield path
    sys.modules.pop("murmurate_file_my_env", None)


def test_a_changed_environment_is_told_to_whoever_goes_on_with_the_run(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", "--env", f"{file}:make_env", *OUT, str(run)]) == 0
    (recorded,) = json.loads((run / "run.json").read_text())["files"].items()
    assert recorded[0] == str(file)
    assert changed([run], stored(run)) == []
    assert main(["eval", str(run)]) == 0
    file.write_text(FILE.replace("6", "7"))
    with pytest.warns(UserWarning, match=WARNING):
        assert main(["eval", str(run)]) == 0
    with pytest.warns(UserWarning, match=WARNING):
        load(run)
    with pytest.warns(UserWarning, match=WARNING):
        assert main(["resume", str(run), "--env-steps", "300"]) == 0
    assert changed([run], stored(run)) == [], "the resumed run is recorded with the file as it is"


def test_a_sweep_tells_that_its_seeds_are_of_different_environments(file: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    base = dataclasses.replace(recipe(f"env:{file}:make_env-a2c"), launcher="inline", env_steps=200)
    sweep = Sweep(base, ["train"], [0, 1], tmp_path / "sweep", say=lines.append)
    sweep._claim()
    words = ["train", "--env", f"{file}:make_env", "--seed"]
    assert main([*words, "0", *OUT, str(sweep.folder / "seed-0")]) == 0
    assert main([*words, "1", *OUT, str(sweep.folder / "seed-1")]) == 0
    assert sweep.train() == 0
    assert not any("warning" in line for line in lines)
    file.write_text(FILE.replace("6", "7"))
    (sweep.folder / "seed-1").rename(tmp_path / "earlier")
    assert main([*words, "1", *OUT, str(sweep.folder / "seed-1")]) == 0
    assert sweep.train() == 0
    first, second = (line for line in lines if "warning" in line)
    assert f"since runs in this folder began, {file} changed" in first
    assert f"{file} changed while the seeds were trained" in second


def test_digests_are_of_files_and_modules_that_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net_module.py").write_text("def torso():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_net_module")
    (tmp_path / "plugin.py").write_text("")
    monkeypatch.setenv("MURMURATE_IMPORT", str(tmp_path / "plugin.py"))
    plain = recipe("cartpole-a2c")
    net = dataclasses.replace(plain.learner, torso="own_net_module:torso")
    files = [str(tmp_path / "own_net_module.py"), str(tmp_path / "plugin.py")]
    assert list(digests(dataclasses.replace(plain, learner=net))) == files
    assert list(digests(recipe("gym:gymnasium:CartPole-v1-a2c"))) == files[1:]
    ends = str(tmp_path / "ends.py")
    Path(ends).write_text("")
    model = MBPO(termination=f"{ends}:far")
    assert list(digests(dataclasses.replace(plain, learner=model))) == [ends, files[1]]
    monkeypatch.delenv("MURMURATE_IMPORT")
    sys.modules.pop("own_net_module")
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", recipe("cartpole-a2c"))
    assert "files" not in json.loads((tmp_path / "run" / "run.json").read_text())
    assert differing([tmp_path / "run", tmp_path / "none"]) == []
    assert changed_files([tmp_path / "run"], recipe("cartpole-a2c")) == ""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module with a strategy, of an installed package with an entry point."""
    path = tmp_path / "their_alone.py"
    path.write_text(STRATEGY)
    about = tmp_path / "their_package-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text("[murmurate.strategies]\nalone = their_alone\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.modules.cache_clear()
    yield path
    sys.modules.pop("their_alone", None)
    plugins.modules.cache_clear()


def test_the_strategy_of_a_package_leaves_its_digest_and_version(package: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "cartpole-a2c", "--strategy", "their-alone", *OUT[2:]]
    assert main([*words, str(run)]) == 0
    recorded = json.loads((run / "run.json").read_text())
    assert list(recorded["files"]) == [str(package)]
    assert recorded["versions"]["their-package"] == "1.5"
    package.write_text(f"{STRATEGY}# edited\n")
    with pytest.warns(UserWarning, match=r"their_alone\.py has changed since the run in .* began"):
        assert main(["eval", str(run)]) == 0


def test_run_folders_name_the_packages_of_worlds() -> None:
    assert versions()["gymnasium"] == metadata.version("gymnasium")
    assert versions()["numpy"] == metadata.version("numpy")
