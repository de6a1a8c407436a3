"""A strategy, two agents, a world, a data set of images with its classifier and evaluation, a source, and a
graph: each is one file of another package, which joins through entry points. Nothing else changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from murmurate import plugins
from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.topology import topologies, topology

PLUGINS = Path(__file__).parent / "plugins"
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
# (recipe, strategy, options, env steps of the first part and of the whole): each plugin by default once
RUNS = [
    ("cartpole-a2c", "post-local-sgd", "--simulators 2 --strategy.switch 3", 640, 960),
    ("catch-two-nets", "push-sum", "--simulators 2 --agent.steps 8", 640, 960),
    ("stripes-cnn", "all-reduce", "--world.count 400", 1600, 3200),
    ("cartpole-lagged-a2c", "gala", "--simulators 2 --lag 3 --strategy.topology skip-ring", 640, 960),
    ("cartpole-softmax-q", "gala", "--simulators 2 --replay.learning-starts 100", 640, 960),
]
MORE = [
    ("cartpole-two-nets", "gala", "--simulators 2", 640, 960),
    ("cartpole-two-nets", "post-local-sgd", "--simulators 2", 640, 960),
    ("catch-two-nets", "all-reduce", "--simulators 2 --agent.steps 8", 640, 960),
    ("stripes-cnn", "elastic", "--world.count 400", 1600, 3200),
    ("cartpole-lagged-a2c", "all-reduce", "--simulators 2 --lag 3", 640, 960),
]


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package of the plugins is installed, as far as Python can tell."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    plugins.modules.cache_clear()
    yield
    plugins.modules.cache_clear()


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def periods(folder: Path, replica: int) -> list[float]:
    """The figure of its own that post-local-sgd records: 1 for four updates, then 2."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r["period"] for r in records if r["replica"] == replica and "period" in r]


@pytest.mark.parametrize(
    ("recipe", "strategy", "options", "first", "whole"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE)],
)
def test_it_trains_saves_resumes_evaluates_and_reports(
    recipe: str,
    strategy: str,
    options: str,
    first: int,
    whole: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    words = ["train", recipe, "--strategy", strategy, "--replicas", "2", "--launcher", "inline"]
    words += ["--env-steps", str(first), "--record-every-seconds", "1e-9", *options.split()]
    assert main([*words, "--out", str(folder)]) == 0, capsys.readouterr().err
    begun = summary(folder)
    assert begun["strategy"] == strategy
    assert begun["env_steps"] >= first
    assert main(["resume", str(folder), "--env-steps", str(whole)]) == 0, capsys.readouterr().err
    ended = summary(folder)
    assert ended["env_steps"] >= whole
    assert ended["updates"] > begun["updates"]
    capsys.readouterr()
    assert main(["eval", str(folder), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert main(["eval", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(("Evaluation over", "Accuracy on"))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "knows no topology" not in page
    if recipe == "stripes-cnn":
        assert figures["accuracy"] == ended["accuracy"]
        assert figures["accuracy"] > 0.5, "four kinds, and it learned"
        assert "accuracy on validation images" in page
    else:
        assert figures["eval_return_mean"] == ended["eval_return_mean"]
    if recipe.endswith("two-nets"):
        steps = 8 if "steps 8" in options else 16
        batches = whole // 2 // (2 * steps)
        assert ended["updates"] == pytest.approx(4 * batches, abs=4), "four updates a batch"
    if "lagged" in recipe:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lags = [record["lag_updates_max"] for record in records if "lag_updates_max" in record]
        assert 0 < max(lags) <= 3 + 1


def test_probes_fire_where_no_count_of_updates_is_a_multiple(tmp_path: Path) -> None:
    """Four updates a batch: 3, 7, 11, ... are never reached, and are passed all the same."""
    words = "train cartpole-two-nets --replicas 2 --launcher inline --simulators 2 --env-steps 1280"
    options = "--probe-every-updates 6 --record-every-seconds 1e-9"
    assert main([*words.split(), *options.split(), "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    probed = [line["updates"] for line in lines if line.get("disagreement") is not None]
    assert probed == sorted(probed)
    assert len(set(probed)) >= 8, "80 updates cross a multiple of 6 thirteen times"


def test_the_first_probe_is_of_the_first_update(tmp_path: Path) -> None:
    words = "train cartpole-a2c --replicas 2 --launcher inline --simulators 2 --updates 3"
    options = "--probe-every-updates 1 --record-every-seconds 1e-9 --eval-episodes 1"
    assert main([*words.split(), *options.split(), "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line.get("updates") == 1)
    assert first["update_norm"] > 0
    # of the replicas' own gradients, not of their mean with itself
    assert min(x for x in first["gradient_cosine"] if x is not None) < 0.9999


@pytest.mark.parametrize(
    "words",
    [
        "train cartpole-a2c --replicas 2 --launcher inline --record-every-seconds 1e-9",
        "simulate cartpole-a2c --replicas 2 --lines 8",
        "simulate cartpole-a2c --replicas 17 --lines 8",  # one record combines them
        "train cartpole-two-nets --replicas 2 --launcher inline --record-every-seconds 1e-9",  # two vectors
    ],
)
def test_figures_of_a_strategys_own_are_recorded(words: str, tmp_path: Path) -> None:
    more = "--strategy post-local-sgd --simulators 1 --agent.steps 4 --eval-episodes 1"
    more += " --updates 8" if words.startswith("simulate") else " --updates 8 --env-steps none"
    assert main([*words.split(), *more.split(), "--out", str(tmp_path / "run")]) == 0
    recorded = periods(tmp_path / "run", 0)
    assert recorded == sorted(recorded)
    assert set(recorded) == {1.0, 2.0}


def test_a_learner_takes_means_over_the_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "train cartpole-two-nets --replicas 2 --launcher inline --simulators 2 --updates 8 --env-steps none"
    )
    words += " --agent.normalize true --record-every-seconds 1e-9"
    assert main([*words.split(), "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    means = [
        [line["advantage_mean"] for line in lines if line.get("replica") == k and "loss" in line]
        for k in (0, 1)
    ]
    assert len(means[0]) >= 2
    for one, other in zip(*means, strict=True):
        assert one == pytest.approx(-other, abs=1e-5), "zero over both replicas"
        assert abs(one) > 1e-4
    capsys.readouterr()
    refused = [*words.split(), "--strategy", "gala", "--out", str(tmp_path / "other")]
    assert main(refused) == 2
    assert "collectives among its replicas" in capsys.readouterr().err


def test_they_are_listed_beside_the_packages_own(capsys: pytest.CaptureFixture[str]) -> None:
    for what, name in (
        ("strategies", "post-local-sgd"),
        ("agents", "two-nets"),
        ("agents", "softmax-q"),
        ("worlds", "catch"),
        ("recipes", "catch-two-nets"),
        ("recipes", "stripes-cnn"),
    ):
        assert main(["list", what, "--json"]) == 0
        assert name in {row["name"] for row in json.loads(capsys.readouterr().out)}


def test_graphs_of_plugins_are_known_by_name_and_by_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert topology("skip-ring").in_peers(0, 5) == (2, 4)
    (tmp_path / "own_graph.py").write_text(
        "from dataclasses import dataclass\nfrom murmurate.topology import Ring\n"
        "@dataclass(frozen=True)\nclass Own(Ring):\n    name = 'own-ring'\n"
    )
    monkeypatch.setenv(plugins.IMPORTS, str(tmp_path / "own_graph.py"))
    plugins.modules.cache_clear()
    assert set(topologies()) > {"own-ring", "skip-ring", "ring"}
    (tmp_path / "clashing_graph.py").write_text(
        "from dataclasses import dataclass\nfrom murmurate.topology import Torus\n"
        "@dataclass(frozen=True)\nclass Own(Torus):\n    name = 'ring'\n"
    )
    monkeypatch.setenv(plugins.IMPORTS, str(tmp_path / "clashing_graph.py"))
    plugins.modules.cache_clear()
    with pytest.raises(Refusal, match=r"two topologies are called 'ring'.*clashing_graph\.Own"):
        topology("complete")


def test_a_subclass_of_an_agent_is_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that CONTRIBUTING.md shows."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "class Decaying(DQN)" in block]
    (tmp_path / "decaying.py").write_text(block)
    monkeypatch.setenv(plugins.IMPORTS, "")
    words = "--launcher inline --simulators 2 --replay.learning-starts 100 --env-steps 1000 --eval-episodes 1"
    folder = tmp_path / "run"
    recipe = f"{tmp_path / 'decaying.py'}:cartpole"
    assert (
        main(["train", recipe, *words.split(), "--record-every-seconds", "1e-9", "--out", str(folder)]) == 0
    )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    explored = [(r["updates"], r["epsilon"]) for r in records if "epsilon" in r]
    assert explored[-1][0] > 50
    assert all(epsilon == pytest.approx(0.999**updates) for updates, epsilon in explored)


def test_a_package_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "broken_pack-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-pack\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[murmurate.strategies]\nmine = broken_pack_module\n")
    (tmp_path / "broken_pack_module.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.modules.cache_clear()
    assert main(["list", "strategies"]) == 2
    said = capsys.readouterr().err
    assert "broken_pack_module, which broken-pack registers as 'mine'" in said
    assert "No module named 'no_such_module_at_all'" in said
    assert "pip uninstall broken-pack" in said


def test_they_run_in_processes_of_their_own(tmp_path: Path) -> None:
    command = "train cartpole-two-nets --strategy post-local-sgd --replicas 2 --simulators 2 --env-steps 1280"
    paths = os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "murmurate", *command.split(), "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["dead_replicas"] == []
    assert set(periods(tmp_path / "run", 1)) == {2.0}, "of its last record at least, after four updates"


@pytest.mark.slow
def test_they_pass_the_conformance_tests_of_the_package(tmp_path: Path) -> None:
    """As their author runs them, in a folder with no settings of pytest."""
    names = "post-local-sgd or two-nets or softmax-q or catch or cnn or lagged-a2c or stripes"
    paths = os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "murmurate.conformance", "-k", names, "-q"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > 50
