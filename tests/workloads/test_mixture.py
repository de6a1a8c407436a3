"""``murmurate train table-gmm`` from a file to a mixture; invalid hyper-parameters."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from murmurate.cli.main import main
from murmurate.conformance.smallest import shortest
from murmurate.datasets.table import Table
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.training.members import build_learner, open_only_source
from murmurate.training.restore import load_agent
from murmurate.training.run_folder import read_run
from murmurate.workloads.mixture_model import GaussianMixture, MixtureModel
from short_runs import refused

CENTRES = np.array([[0.0, 100.0], [8.0, 104.0], [-8.0, 92.0]])
SHORT = ("--launcher", "inline", "--agent.components", 6, "--agent.batch", 50)


def drawn(rows, seed):
    random = np.random.default_rng(seed)
    return CENTRES[random.choice(3, rows, p=[0.5, 0.3, 0.2])] + random.normal(size=(rows, 2))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "drawn.csv"
    np.savetxt(path, drawn(2000, 0), delimiter=",", header="x,y", comments="")
    return path


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def facts(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def folder(path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "run"
    arguments = ("train", "table-gmm", "--world.path", path, *SHORT, "--env-steps", 20_000, "--out", folder)
    assert run(*arguments) == 0
    return folder


def test_a_run_finds_the_clusters(folder):
    summary = facts(folder)
    assert summary["test_rows"] == 100
    assert summary["validation_rows"] == 40
    validation = read_run(folder, recipe).world.divided().validation.select(range(40))
    mixture = load_agent(read_run(folder, recipe), folder / "checkpoints/last").estimate()
    expected = float(mixture.log_likelihood(validation).mean())
    assert summary["validation_log_likelihood"] == pytest.approx(expected)
    assert summary["resume_exact"]
    # of the three: -sum p log p for the choice, 1 + log 2 pi for two unit normals
    entropy = 1 + np.log(2 * np.pi) - sum(p * np.log(p) for p in (0.5, 0.3, 0.2))
    assert summary["log_likelihood"] == pytest.approx(-entropy, abs=0.35)
    assert summary["bound_per_row"] < summary["log_likelihood"]
    mixture = load_agent(read_run(folder, recipe), folder / "checkpoints" / "last").estimate()
    np.testing.assert_allclose(sorted(mixture.weights.tolist(), reverse=True), summary["weights"])
    assert sum(summary["weights"]) == pytest.approx(1)
    shares = mixture.responsibilities(Table(CENTRES))
    torch.testing.assert_close(shares.sum(1), torch.ones(3, dtype=torch.float64))
    nearest = mixture.means[shares.argmax(1)].numpy()
    np.testing.assert_allclose(nearest, CENTRES, atol=1.0)
    held = Table(drawn(500, 1))
    assert float(mixture.log_likelihood(held).mean()) == pytest.approx(-entropy, abs=0.2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("log_likelihood" in line and "bound_per_row" in line for line in lines)


def test_a_simulated_cluster_learns_a_table_too(path, tmp_path):
    few = ("--replicas", 3, "--strategy", "gala", *SHORT[2:], "--updates", 10, "--out", tmp_path / "run")
    assert run("simulate", "table-gmm", "--world.path", path, *few) == 0
    assert facts(tmp_path / "run")["log_likelihood"] < 0
    assert facts(tmp_path / "run")["exit"] == "finished"


def test_a_run_goes_on_with_its_table_wherever_that_lies(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    np.save("x.npy", drawn(300, 0))
    np.save("another.npy", drawn(300, 1))
    arguments = ("train", "table-gmm", "--world.path", "x.npy", *SHORT, "--env-steps", 500, "--out", "run")
    assert run(*arguments) == 0
    monkeypatch.chdir("/")
    more = ("resume", tmp_path / "run", "--env-steps")
    assert run(*more, 800) == 0
    (tmp_path / "x.npy").rename(tmp_path / "new/x.npy")
    result = load_agent(read_run(tmp_path / "run", recipe), tmp_path / "run/checkpoints/last").estimate()
    assert result.means.shape[1] == 2, "what was learned is in the run folder"
    capsys.readouterr()
    assert "Give its present path: murmurate resume DIR --world.path NEW" in refused(capsys, *more, 1000)
    other = (*more, 1000, "--world.path", tmp_path / "another.npy")
    assert "is not what the run was fitted on: 300 rows of 2 then, 300 of 2 now" in refused(capsys, *other)
    assert run(*more, 1000, "--world.path", tmp_path / "new/x.npy") == 0
    assert facts(tmp_path / "run")["env_steps"] >= 1000


def test_what_was_stopped_goes_on_to_the_same_end(path, tmp_path):
    """Two replicas under all-reduce: a run that was resumed ends as one that was not, to the bit."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    common = ("--world.path", path, *SHORT, "--replicas", 2, "--strategy", "all-reduce")
    assert run("train", "table-gmm", *common, "--env-steps", 6000, "--out", whole) == 0
    assert run("train", "table-gmm", *common, "--env-steps", 3000, "--out", halves) == 0
    assert run("resume", halves, "--env-steps", 6000) == 0
    ends = [
        load_agent(read_run(f, recipe), f / "checkpoints" / "last").replica.params for f in (whole, halves)
    ]
    assert torch.equal(*ends)
    assert facts(halves)["log_likelihood"] == facts(whole)["log_likelihood"]


def test_a_replica_with_the_state_of_one_that_measures_reports_nothing_measured(tmp_path):
    gmm = shortest("gmm", tmp_path)
    gmm = dataclasses.replace(gmm, replicas=2, learner=dataclasses.replace(gmm.learner, validate_every=2))
    donor, joiner = (build_learner(gmm, rank, Replica) for rank in (0, 1))
    for learner in (donor, joiner):
        batches = open_only_source(gmm, learner)
        metrics = [learner.learn(next(batches)).read_metrics() for _ in range(2)]
        assert ("log_likelihood" in metrics[-1]) == (learner is donor)
    joiner.load(donor.state())
    assert "log_likelihood" not in joiner.learn(next(batches)).read_metrics()


def test_what_makes_no_sense_is_refused(path, folder, capsys, tmp_path):
    still = tmp_path / "still.npy"
    np.save(still, np.c_[np.ones(50), np.arange(50)])
    for arguments, words in [
        ((), "say which table"),
        (("--world.path", tmp_path / "no.csv"), "no.csv"),
        (("--world.path", path, "--agent.components", 0), "components is 0"),
        (("--world.path", path, "--agent.freedom", 1.0), "above 1"),
        (("--world.path", path, "--agent.concentration", 0.0), "concentration is 0.0"),
        (("--world.path", path, "--world.test", 2000), "nothing is left"),
        (("--world.path", path, "--actors", 2), "There is no field called 'actors'"),
        (("--world.path", still), "Column 0"),
    ]:
        train = ("train", "table-gmm", "--launcher", "inline", "--out", tmp_path / "x")
        reported = refused(capsys, *train, *arguments)
        assert words in reported, (arguments, reported)
    capsys.readouterr()
    assert "has no pictures" in refused(capsys, "eval", folder, "--video")
    assert "no topic model" in refused(capsys, "topics", "show", folder)


def test_a_step_that_would_leave_nothing_ends_the_run_in_a_sentence(path, tmp_path, capsys):
    rate = ("--agent.rate", 0.999999, "--agent.forgetting", 0.0)
    train = ("train", "table-gmm", "--world.path", path, *SHORT, *rate, "--out", tmp_path / "x")
    assert run(*train, "--strategy", "hogwild") == 1
    said = capsys.readouterr().err
    assert "leaves nothing of it" in said
    assert "a greater delay or forgetting" in said  # the rate has no effect under Robbins-Monro
    assert "--strategy solo" in said
    assert run(*train, "--strategy", "solo", "--updates", 2, "--out", tmp_path / "y") == 0


def fitted(values, total):
    """The log likelihood after some passes, as of ``total`` rows like these."""
    table, mixture = (
        Table(values),
        GaussianMixture(MixtureModel(components=6, validate_every=0), values.shape[1]),
    )
    mixture.initialise(table, total, np.random.default_rng(0))
    x = mixture.table.detach()
    for _ in range(10):
        found, _ = mixture.statistics(mixture.expected(x, 1.0, table), table, total / len(values))
        x = 0.7 * x + 0.3 * found.values
    return float(mixture.estimate(x).log_likelihood(table).mean())


@pytest.mark.parametrize("total", [3_000, 10**8, 10**9])
def test_collinear_columns_of_many_rows_are_no_error(total):
    """A category as one column for each of its values, which add up to 1: rounding grows with the rows."""
    random = np.random.default_rng(0)
    values = np.c_[random.normal(size=(3_000, 3)), np.eye(3)[random.integers(0, 3, 3_000)]]
    assert np.isfinite(fitted(values, total))


@pytest.mark.parametrize("column", [lambda z: 1e-11 * z, lambda z: 1.7e9 + 0.1 * z], ids=["small", "times"])
def test_columns_that_vary_little_are_learned_from(column):
    random = np.random.default_rng(0)
    z = random.normal(size=(3_000, 2))
    assert np.isfinite(fitted(np.c_[z[:, :1], column(z[:, 1:])], 3_000))


@pytest.mark.parametrize("value", [0.0, 3.3, 1.1e9])
def test_a_constant_column_is_refused(value):
    values = np.c_[np.arange(100.0), np.full(100, value)]
    with pytest.raises(Refusal, match=r"Column 1 .* is the same in 100 rows.*Leave it out"):
        fitted(values, 100)
