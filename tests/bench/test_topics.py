"""``bench topics`` on a corpus of a few hundred documents, and its figures from curves written by hand."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from murmurate.bench import topics, topics_stream
from murmurate.bench._peer_protocols import topics_windows
from murmurate.bench._server import Server
from murmurate.bench.topics import Contender, Point, TopicsPlan

TINY = TopicsPlan(
    documents=300, held_out=60, vocabulary=120, mean_length=60, real=False, passes=2, rounds=2, trap=300
)


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MURMURATE_PEERS", str(tmp_path_factory.mktemp("nobody")))
        return topics.measure(TINY, quiet)


def test_without_peers_it_measures_ours_and_says_who_is_absent(result: dict) -> None:
    assert [peer["peer"] for peer in result["peers"]] == list(topics.PEERS)
    assert all(peer["status"].startswith("not installed") for peer in result["peers"])
    assert result["documents_per_second"] > 0
    for key in ("ratio_sklearn", "ratio_gensim", "perplexity_sklearn", "perplexity_gensim"):
        assert result[key] is None
    assert json.loads(json.dumps(result))["perplexity"] == result["perplexity"]
    rows = {row["label"]: row for row in result["corpora"]["generated"]}
    assert len(rows) == 6
    for row in rows.values():
        documents = [point["documents"] for point in row["curve"]]
        seconds = [point["cpu_seconds"] for point in row["curve"]]
        assert documents == sorted(set(documents))
        assert seconds == sorted(seconds)
        assert row["perplexity"]["repetitions"] == 2


def test_every_step_rule_is_run_from_every_start(result: dict) -> None:
    labels = {row["label"] for row in result["step_rules"]}
    assert len(labels) == 12
    assert {f"{rule} from {start}" for rule in topics._RULES for start in topics._STARTS} < labels


def test_scikit_learn_computes_in_float64_and_once_as_precisely_as_the_others() -> None:
    precisions = {
        contender.label: contender.options["precision"]
        for contender in topics.contenders(TINY)
        if "precision" in contender.options
    }
    assert precisions == {"scikit-learn float32 20 iterations": "float32"}


@pytest.mark.parametrize(("name", "batch"), [("gensim", 2000), ("scikit-learn", 128)])
def test_peers_run_with_their_own_defaults_too(name: str, batch: int) -> None:
    (own,) = [each for each in topics.contenders(TINY) if each.label == f"{name} defaults"]
    assert (own.library, own.options["batch"], own.options["iterations"]) == (name, batch, None)


def test_lambda_comes_back_as_it_was_fitted_and_is_judged(tmp_path: Path) -> None:
    train, test = topics.generated(TINY)
    options = {**topics._COMMON, "topics": 5, "batch": 50, "init": "random"}
    contender = Contender("ours", "murmurate", options, (0.5, 8.0))
    with Server.start_module("murmurate.bench._topics_server") as server:
        early, late = topics.fit(server, train, contender, 0, tmp_path)
        again = topics.fit(server, train, contender, 0, tmp_path)
    assert (early[0], late[0]) == (150, 2400)
    assert late[2].shape == (120, 5)
    assert np.array_equal(again[1][2], late[2])  # the seed decides
    assert not np.array_equal(early[2], late[2])
    # what has been seen, scaled to the corpus: a topic's words add up to about all tokens
    assert late[2].sum() == pytest.approx(train.tokens, rel=0.3)
    assert topics.perplexity(np.ones((120, 5), np.float32), test) == pytest.approx(120)  # who knows nothing
    assert topics.perplexity(late[2], test) < 110


@pytest.mark.parametrize(
    ("sweeps", "passes"), [(5, (5,)), (40, (10, 20, 30, 40)), (45, (10, 20, 30, 40, 45))]
)
def test_the_sampler_is_evaluated_after_its_last_sweep(sweeps: int, passes: tuple[int, ...]) -> None:
    assert topics.contenders(TopicsPlan(sweeps=sweeps))[-1].passes == passes


def test_the_sampler_makes_all_its_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(trained=[], add_doc=lambda words: None)
    model.train = lambda sweeps, workers: model.trained.append(sweeps)
    monkeypatch.setitem(sys.modules, "tomotopy", SimpleNamespace(LDAModel=lambda **options: model))
    monkeypatch.setitem(sys.modules, "topics_windows", topics_windows)
    peer = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/peers/tomotopy/run.py"))
    rows = topics_windows.DocumentRows(np.array([0, 1, 1]), np.array([0]), np.array([2]), 1)
    seen: list[int] = []
    options = {"topics": 1, "prior": 0.05, "alpha": 0.08, "seed": 0, "passes": 7}
    peer["prepare"](rows, options)(lambda documents, matrix: seen.append(documents))
    assert (model.trained, seen) == ([5, 2], [10, 14])


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(100 * (i + 1), seconds, value) for i, (seconds, value) in enumerate(pairs)]


CURVES = {
    "murmurate 20 iterations": [points((1, 900), (2, 700)), points((1, 920), (4, 720))],
    "murmurate defaults": [points((1, 800), (2, 790)), points((1, 800), (2, 790))],
    "murmurate dpsvi": [points((1, 760), (2, 650)), points((1, 760), (2, 650))],
    "gensim 20 iterations": [points((4, 950), (10, 760)), points((4, 950), (10, 780))],
    "gensim": [points((9, 990), (19, 980)), points((9, 990), (19, 980))],
    "scikit-learn 20 iterations": [points((2, 970), (6, 790)), points((2, 970), (12, 810))],
    "scikit-learn float32 20 iterations": [points((1, 970), (4, 790)), points((1, 970), (8, 810))],
    "tomotopy": [points((3, 900), (6, 800), (9, 700)), points((3, 900), (6, 800), (9, 720))],
}


def test_ratios_are_taken_round_by_round() -> None:
    figures = topics.headline(CURVES)
    assert figures["documents_per_second"] == pytest.approx(75)  # 200 / 2 and 200 / 4
    assert figures["ratio_gensim"] == pytest.approx((5 + 2.5) / 2)
    assert figures["ratio_sklearn"] == pytest.approx(3)
    assert figures["ratio_sklearn_float32"] == pytest.approx(2)
    assert figures["perplexity_gensim"] == 770
    assert figures["perplexity_sklearn"] == 800
    assert (figures["perplexity"], figures["perplexity_defaults"]) == (710, 790)


def test_time_is_to_where_the_best_of_the_peers_ends() -> None:
    row = topics.to_the_peers(CURVES)
    assert (row["peer"], row["perplexity"], row["cpu_seconds"]) == ("gensim 20 iterations", 770, 10)
    # 2 s to 760 in the first round, 4 s to 780 in the second
    assert row["ours"]["murmurate 20 iterations"] == {"cpu_seconds": 3, "times_faster": (5 + 2.5) / 2}
    assert row["ours"]["murmurate defaults"] == {"cpu_seconds": None, "times_faster": None}
    assert row["ours"]["murmurate dpsvi"] == {"cpu_seconds": 1, "times_faster": 10}


def test_the_sampler_is_looked_at_after_thirty_sweeps() -> None:
    row = topics.dpsvi_against_sampler(CURVES, TopicsPlan(sweeps=30))
    assert (row["sampler_perplexity"], row["sampler_cpu_seconds"]) == (710, 9)
    assert (row["perplexity"], row["cpu_seconds_to_the_samplers"]) == (650, 2)
    assert "sampler_perplexity" not in topics.dpsvi_against_sampler(CURVES, TopicsPlan(sweeps=20))


def test_a_small_stream_is_learned_by_the_command_and_its_processes_are_measured() -> None:
    plan = topics_stream.StreamPlan(documents=400, vocabulary=100, mean_length=50, topics=4)
    told = topics_stream.measure(plan, quiet)
    assert told["documents"] >= 372 - 256  # a pass through all but those kept back, in whole batches
    assert told["perplexity"] < 110
    assert told["entries"] > 400
    assert len(told["peak_resident_bytes"]) >= 3  # the command and two replicas
    assert 2**24 < told["peak_resident_bytes_most"] < 2**31
