"""What ``murmurate simulate`` refuses, and what it checks as ``train`` does."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
from short_simulations import run_of

from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import simulate
from murmurate.sources.trajectory_source import TrajectorySourceConfig
from short_runs import refused


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (Cluster(compute="gamma:1"), "no model 'gamma'"),
        (Cluster(compute="gamma"), "no model 'gamma'"),
        (Cluster(compute="constant:much"), "'much' is no number.*constant:0.01"),
        (Cluster(compute="constant:"), r"takes 1 number\(s\), not 0"),
        (Cluster(compute="constant:1e300"), "at most 1e\\+09"),  # the clock would stand still
        (Cluster(compute="lognormal:0.01,1000"), "spread must be from 0 to 50"),  # OverflowError
        (Cluster(network="spread=1000"), "spread must be from 0 to 50"),
        (Cluster(network="latency="), "'' is no number"),
        (Cluster(compute="straggler:0.01,4,99"), "slows 99 replicas, and the run has"),
        (Cluster(compute="trace:/nowhere"), r"/nowhere cannot be read \(No such file"),
        (Cluster(network="trace=/dev/null"), "/dev/null holds no numbers"),
        (Cluster(compute=f"trace:{sys.executable}"), "holds no numbers. For example"),  # a binary file
        (Cluster(network="speed=1"), "no 'speed'"),
        (Cluster(network="bandwidth=0"), "above 0"),
        (Cluster(network="ports=perhaps"), "yes or no"),
        (Cluster(network="collective=star"), "ring, tree or fastest"),
        (Cluster(loss=1.0), "not a share"),
        (Cluster(crash_every_seconds=0), "crash_every_seconds is 0"),
        (Cluster(pause_every_seconds=1e-300), "pause_every_seconds is 1e-300"),  # would never end
        (Cluster(partition=(1.0, 0.5, 0.5)), "a start, an end and a share"),
        (Cluster(late_join=(1.0, 1.0)), "a share and seconds"),
    ],
)
def test_what_makes_no_sense_is_refused_with_nothing_changed(tmp_path, cluster, words):
    with pytest.raises(Refusal, match=words):
        simulate(run_of(), cluster, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loggers": ("mlflow",)}, "leave out --loggers"),
        ({"restarts": 2}, "--restart-after"),
        ({"compression": "int8"}, "leave out --compression int8"),
        ({"probe_every_updates": 5}, "leave out --probe-every-updates"),
        ({"launcher": "torchrun"}, "leave out --launcher torchrun"),
        ({"source": TrajectorySourceConfig(actors=2)}, "beside its virtual clock: use --actors 0"),
    ],
)
def test_options_without_an_effect_are_refused(tmp_path, fields, words):
    with pytest.raises(Refusal, match=words):
        simulate(dataclasses.replace(run_of(), **fields), Cluster(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_is_prepared_as_one_of_processes_is(tmp_path):
    """An environment of one's own is tried, and the strategy takes its step from the model."""
    (tmp_path / "failing_env.py").write_text(
        "import gymnasium\n"
        "class Failing(gymnasium.Wrapper):\n"
        "    def __init__(self):\n"
        "        super().__init__(gymnasium.make('CartPole-v1'))\n"
        "    def step(self, action):\n"
        "        raise KeyError('nope')\n"
    )
    with pytest.raises(Refusal, match="raised KeyError in step"):
        simulate(recipe(f"env:{tmp_path}/failing_env.py:Failing-a2c"), Cluster(), tmp_path / "env")
    assert not (tmp_path / "env").exists()

    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(100, 2)))
    words = ["simulate", "table-gmm", "--world.path", str(tmp_path / "rows.npy"), "--agent.batch", "10"]
    words += ["--agent.step-rule", "paper", "--strategy", "dpsgd", "--agent.rate", "0.2", "--updates", "2"]
    assert main([*words, "--replicas", "2", "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["strategy"]["global_learning_rate"] == 0.2


def test_a_wrong_option_names_the_nearest(capsys):
    words = ["simulate", "cartpole-gala", "--crash-every-second", "3"]
    assert "Did you mean --crash-every-seconds?" in refused(capsys, *words)
