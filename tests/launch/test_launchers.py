"""How launchers are found, those of other packages too, and what they refuse before anything is changed."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

import murmurate
from murmurate import plugins
from murmurate.cli.sweep import crowding
from murmurate.errors import Refusal
from murmurate.launch import launcher, launchers
from murmurate.native import cores
from murmurate.recipes import recipe
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import simulate
from short_runs import altered, preflight

THEIRS = '''
from murmurate.launch.inline import Inline


class Quiet(Inline):
    """A launcher of another package."""

    name = "quiet"
'''


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with one more launcher, as pip would leave it."""
    (tmp_path / "their_launchers.py").write_text(THEIRS)
    installed = tmp_path / "their_package-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[murmurate.launch]\nquiet = their_launchers\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    plugins.modules.cache_clear()
    yield
    plugins.modules.cache_clear()
    sys.modules.pop("their_launchers", None)


def test_the_launchers_of_this_package() -> None:
    assert list(launchers()) == ["inline", "local", "ray", "torchrun"]
    with pytest.raises(Refusal, match="Did you mean 'torchrun'"):
        launcher("torchrum")


@pytest.mark.usefixtures("theirs")
def test_a_launcher_of_another_package_starts_runs(tmp_path: Path) -> None:
    """In one process, so that its runs need not be pickled."""
    made = murmurate.train(
        env=lambda: gymnasium.make("CartPole-v1"), algorithm="a2c", launcher="quiet", updates=2, simulators=2,
        eval_episodes=1, quiet=True, out=tmp_path / "run",
    )  # fmt: skip
    assert made.summary["launcher"] == "quiet"


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("algorithm", ["apex-dqn", "impala", "service-dqn"])
def test_a_launcher_of_one_process_has_no_actors(algorithm: str) -> None:
    run = dataclasses.replace(recipe(f"cartpole-{algorithm}"), launcher="quiet")
    told = "actors are processes, and the quiet launcher has none. Use --launcher local, or --actors 0"
    with pytest.raises(Refusal, match=told):
        preflight(run)
    launcher("quiet").check(altered(run, actors=0))


@pytest.mark.usefixtures("theirs")
def test_runs_at_once_of_a_launcher_of_one_process_are_a_process_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 5)
    run = dataclasses.replace(recipe("cartpole-impala"), replicas=2)
    assert crowding(run, launcher("quiet"), 5) == ""
    assert "6 runs at once are 6 processes on 5 cores" in crowding(run, launcher("quiet"), 6)
    assert "2 runs at once are 12 processes on 5 cores" in crowding(run, launcher("local"), 2)


@pytest.mark.usefixtures("theirs")
def test_a_simulated_run_may_name_any_launcher_of_one_process(tmp_path: Path) -> None:
    run = dataclasses.replace(recipe("cartpole-gala"), launcher="quiet", compression="int8")
    with pytest.raises(Refusal, match="leave out --compression"):
        simulate(run, Cluster(), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("inline", {"restarts": 1}, "the inline launcher does not start replicas again"),
        ("inline", {"compression": "int8"}, "the inline launcher keeps all replicas on one host"),
        ("local", {"compression": "int8"}, "the local launcher keeps all replicas on one host"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(name: str, fields: dict[str, object], words: str) -> None:
    run = dataclasses.replace(recipe("cartpole-gala"), launcher=name, **fields)
    with pytest.raises(Refusal, match=words):
        preflight(run)
