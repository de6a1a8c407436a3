"""Launchers of other packages run scripts (``murmurate.run``), or say that they do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import murmurate
from murmurate import plugins
from murmurate.errors import Refusal, RunFailed

PLUGINS = Path(__file__).parent / "plugins"
ONLY_RECIPES = """
from murmurate.launch.inline import Inline


class Quiet(Inline):
    name = "quiet"
"""


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of the plugins is installed, as far as Python can tell."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    plugins.modules.cache_clear()
    yield
    plugins.modules.cache_clear()


def learns(loop: murmurate.OwnLoop) -> tuple[int, int, list[float]]:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(net.weight, float(loop.rank))
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.5), net)
    optimizer.zero_grad()
    (net(torch.ones(1, 1)) * (1 + loop.rank)).sum().backward()
    optimizer.step()
    return loop.rank, torch.get_num_threads(), [round(w, 4) for w in net.weight.flatten().tolist()]


def test_a_launcher_that_joins_through_an_entry_point_runs_scripts() -> None:
    found = murmurate.run(learns, replicas=3, launcher="turns")
    assert found == [
        (rank, 1, [-1.0]) for rank in range(3)
    ]  # from replica 0's weight, by the mean gradient 2
    assert found == murmurate.run(learns, replicas=3, launcher="inline", threads=1)


def test_it_is_asked_what_its_fabric_offers() -> None:
    with pytest.raises(Refusal, match="hogwild needs shared memory, which a fabric of turns does not offer"):
        murmurate.run(learns, replicas=2, strategy="hogwild", launcher="turns")


def breaks(loop: Any) -> None:
    raise LookupError("no such image")


def test_an_error_in_it_is_told_with_the_replicas_name() -> None:
    with pytest.raises(RunFailed, match=r"replica 0 failed: LookupError: no such image"):
        murmurate.run(breaks, launcher="turns")


def test_ranks_that_would_each_start_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in engine.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match=r"started this script 2 times.*launcher='turns'. Leave launcher out"):
        murmurate.run(learns, launcher="turns")


def test_one_of_recipes_alone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quiet_launcher.py").write_text(ONLY_RECIPES)
    monkeypatch.setenv(plugins.IMPORTS, str(tmp_path / "quiet_launcher.py"))
    plugins.modules.cache_clear()
    with pytest.raises(
        Refusal, match="the quiet launcher trains recipes, and runs no scripts: leave launcher"
    ):
        murmurate.run(learns, launcher="quiet")
    with pytest.raises(
        Refusal, match=r"no launcher for scripts called 'qiuet'.* Use one of: inline, local, ray"
    ):
        murmurate.run(learns, launcher="qiuet")
