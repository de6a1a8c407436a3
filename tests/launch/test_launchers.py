"""How launchers are found, those of other packages too, and what they refuse before anything is changed."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from murmurate import plugins
from murmurate.errors import Refusal
from murmurate.launch import launcher, launchers
from murmurate.recipes import recipe
from short_runs import altered, preflight, train

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
    run = altered(recipe("cartpole-a2c"), launcher="quiet", updates=2, simulators=2, eval_episodes=1)
    assert train(run, tmp_path / "run").code == 0


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
