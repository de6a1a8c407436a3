"""Launchers of other packages run scripts (``murmurate.run``), or say that they do not."""

from __future__ import annotations

import sys
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


def only_rank_1_breaks(loop: Any) -> None:
    if loop.rank == 1:
        raise LookupError("no such image")
    learns(loop)


@pytest.mark.parametrize("seed", range(4))  # each with an order of its own
def test_an_error_of_one_replica_is_told_and_not_that_others_waited_for_it(seed: int) -> None:
    with pytest.raises(RunFailed, match=r"^replica 1 failed: LookupError: no such image"):
        murmurate.run(only_rank_1_breaks, replicas=2, launcher="turns", seed=seed)


def prints(loop: murmurate.OwnLoop) -> None:
    print("hello from", loop.rank)
    learns(loop)
    print("goodbye from", loop.rank)


@pytest.mark.parametrize("seed", range(4))
def test_threads_leave_stdout_and_the_torch_threads_as_they_were(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stdout, threads = sys.stdout, torch.get_num_threads()
    murmurate.run(prints, replicas=2, launcher="turns", seed=seed, threads=threads + 1)
    assert (sys.stdout, torch.get_num_threads()) == (stdout, threads)
    assert capsys.readouterr().out == "hello from 0\ngoodbye from 0\n"


def test_ray_needs_no_launcher_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (broken / "entry_points.txt").write_text("[murmurate.launch]\nbroken = no_module_of_this_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Refusal, match=r"^devices='auto' takes this host's GPUs, and Ray's hosts"):
        murmurate.run(learns, launcher="ray", devices="auto")
    with pytest.raises(Refusal, match="no_module_of_this_name, which broken registers"):
        murmurate.run(learns, launcher="turns")


def test_what_is_no_name_is_refused() -> None:
    names: Any = ["local"]
    with pytest.raises(Refusal, match=r"^launcher is \['local'\]: give the name of one"):
        murmurate.run(learns, launcher=names)


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
