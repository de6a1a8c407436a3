"""``murmurate topics`` from a file to words, and what happens when things break."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from topic_runs import run, summary

import murmurate
from murmurate.cli import topics, topics_tables
from murmurate.cli.main import main
from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from murmurate.errors import Refusal
from murmurate.record.reader import read_metrics
from sessions import session
from short_runs import refused
from waiting import DEADLINE_SECONDS, until

K = 5
FIELDS = ("--topics", K, "--batch", 32, "--alpha", 0.2, "--prior", 0.1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """UCI's two files: documents drawn from five topics."""
    path: Path = tmp_path_factory.mktemp("corpus") / "docword.small.txt"
    drawn = generate(
        documents=600, vocabulary=100, topics=K, mean_length=50, seed=0, topic_mass=8.0, alpha_mass=1.0
    )
    write(drawn.corpus, path, "uci")
    (path.parent / "vocab.small.txt").write_text("".join(f"word{v:03}\n" for v in range(100)))
    return path


@pytest.fixture(scope="module")
def folder(path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("topics") / "run"
    assert run("topics", "fit", path, *FIELDS, "--launcher", "inline", "--passes", 4, "--out", folder) == 0
    return folder


def test_evaluations_take_a_number_of_documents(folder, capsys):
    capsys.readouterr()

    def evaluated(*words):
        assert run("eval", folder, "--json", *words) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    whole = evaluated()
    assert whole["test_documents"] == 30
    assert whole["perplexity"] == pytest.approx(summary(folder)["perplexity"])
    assert evaluated("--episodes", 7)["test_documents"] == 7
    with pytest.raises(Refusal, match="take at least one"):
        murmurate.load(folder).evaluate(episodes=0)


def test_documents_of_a_few_words_have_no_perplexity(folder, tmp_path, capsys):
    short = tmp_path / "docword.short.txt"
    short.write_text("1\n100\n2\n1 1 1\n1 2 1\n")
    perplexity = []
    for seed in range(8):  # of two words, with some seeds none is held out
        assert run("topics", "evaluate", folder, short, "--seed", seed, "--json") == 0
        perplexity.append(json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"])
    assert any(perplexity)
    assert run("topics", "evaluate", folder, short, "--seed", perplexity.index(None)) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in said if words and words[0].startswith("perplexity")] == ["-", "-"]


def test_two_numbers_of_documents_are_refused(path, tmp_path, capsys):
    words = ("topics", "fit", path, *FIELDS, "--passes", 3, "--env-steps", 8, "--out", tmp_path / "x")
    assert "Leave one out" in refused(capsys, *map(str, words))
    words = (
        "topics",
        "fit",
        path,
        *FIELDS,
        "--env_steps",
        64,
        "--launcher",
        "inline",
        "--out",
        tmp_path / "y",
    )
    assert run(*words) == 0
    assert summary(tmp_path / "y")["env_steps"] == 64


def test_a_run_learns_and_says_how_well(folder):
    facts = summary(folder)
    train = 600 - 12 - 30
    assert 4 * train <= facts["env_steps"] < 4 * train + 32
    assert facts["test_documents"] == 30
    assert facts["diversity"] > 0.6
    assert facts["perplexity"] < 50  # of 100 words
    assert facts["validation_documents"] == 12
    assert facts["validation_perplexity"] < 50
    # of fewer than 100 updates, and of as many documents as are validated at a time
    assert facts["updates"] < 100
    (*_, last) = (r for r in read_metrics(folder / "metrics.jsonl") if r["replica"] == 0 and "kind" not in r)
    assert last["perplexity"] == pytest.approx(facts["validation_perplexity"], rel=0.01)
    assert facts["resume_exact"]
    assert facts["exit"] == "finished"


def test_show(folder, capsys, tmp_path):
    page = tmp_path / "page.html"
    assert run("topics", "show", folder, "--words", 3, "--out", page, "--json") == 0
    topics = json.loads(capsys.readouterr().out)
    assert sorted(row["topic"] for row in topics) == list(range(K))
    assert sum(row["weight"] for row in topics) == pytest.approx(1)
    assert all(one["word"].startswith("word") for row in topics for one in row["words"])
    assert all(len(row["words"]) == 3 for row in topics)
    assert topics[0]["words"][0]["word"] in page.read_text()
    assert run("topics", "show", folder) == 0
    said = capsys.readouterr().out
    assert topics[0]["words"][0]["word"] in said
    assert f"diversity {summary(folder)['diversity']:.2f}" in said
    assert "topics are similar" not in said
    assert (folder / "topics.html").exists()


def test_show_says_that_topics_are_alike(path, capsys, tmp_path):
    """One step on nearly all documents makes all topics the corpus's own mixture."""
    one = ("--updates", 1, "--batch", 500, "--launcher", "inline", "--out", tmp_path / "run")
    assert run("topics", "fit", path, "--topics", K, *one) == 0
    capsys.readouterr()
    assert run("topics", "show", tmp_path / "run") == 0
    assert "topics are similar" in capsys.readouterr().out


def test_transform_and_evaluate(folder, path, capsys, tmp_path):
    assert run("topics", "transform", folder, path, "--out", tmp_path / "w.npz") == 0
    weights = np.load(tmp_path / "w.npz")["topics"]
    assert weights.shape == (600, K)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    capsys.readouterr()
    assert run("topics", "evaluate", folder, "--json") == 0
    mine = json.loads(capsys.readouterr().out)
    assert mine["perplexity"] == pytest.approx(summary(folder)["perplexity"])
    assert run("topics", "evaluate", folder, path, "--seed", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out)["test_documents"] == 600
    assert run("report", folder) == 0
    assert (folder / "report.html").exists()


def test_resumed_is_uninterrupted(path, tmp_path, folder):
    """Stopped after some passes and resumed to the end: the same topics to the bit."""
    short = tmp_path / "short"
    inline = ("--launcher", "inline", "--out", short)
    assert run("topics", "fit", path, *FIELDS, *inline, "--passes", 2) == 0
    assert run("resume", short, "--env-steps", 4 * (600 - 12 - 30)) == 0
    assert summary(short)["perplexity"] == summary(folder)["perplexity"]


def test_what_makes_no_sense_is_refused(path, folder, capsys, tmp_path):
    capsys.readouterr()
    fit = ("topics", "fit")
    for arguments, words in [
        ((*fit,), "Say which corpus"),
        ((*fit, tmp_path / "no.txt"), "no.txt"),
        ((*fit, path, "--passes", 0), "--passes: '0' is no number above 0"),
        ((*fit, path, "--topics", 0), "topics is 0"),
        ((*fit, path, "--topic", 5), "no field called 'topic'"),
        ((*fit, path, "--strategy", "dpsdg"), "dpsgd"),
        ((*fit, path, "--actors", 2), "There is no field called 'actors'"),
        ((*fit, path, "--test", 600), "nothing is left"),
        ((*fit, path, "--min-df", 3), "is for corpora of kind text"),
        ((*fit, path, "--stop-words", tmp_path / "no.txt"), "no.txt cannot be read"),
        (("topics", "show", folder, "--words", 0), "--words: '0' is no integer at least 1"),
        (("topics", "transform", folder, path, "--out", tmp_path / "w.xls"), "none of .csv, .npz, .parquet"),
        (("topics", "evaluate", folder, "--skip-bad"), "--skip-bad says how a corpus is read"),
        (("train", "corpus-lda"), "say which corpus"),
    ]:
        said = refused(capsys, *arguments)
        assert words in said, (arguments, said)


def test_a_run_whose_learner_estimates_nothing_has_no_topics(folder, capsys, monkeypatch):
    monkeypatch.setattr(topics, "load_agent", lambda run, folder: object())  # as a classifier of images
    assert "is no topic model" in refused(capsys, "topics", "show", folder)


def test_a_run_is_evaluated_by_the_common_command_too(folder, capsys):
    capsys.readouterr()
    assert run("eval", folder) == 0
    assert capsys.readouterr().out.startswith("Perplexity of ")


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_ranks_of_torchrun_are_the_replicas(path, tmp_path, monkeypatch, launcher):
    """A fit under torchrun was refused: it had one replica, whatever the number of ranks."""
    runs = []

    def begun(run, *_):
        runs.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(topics, "train", begun)
    monkeypatch.setenv("WORLD_SIZE", "3")
    fit = ("topics", "fit", path, *FIELDS, "--strategy", "all-reduce", "--out", tmp_path / "run")
    assert main([str(word) for word in (*fit, "--launcher", launcher)]) == 130
    assert [run.replicas for run in runs] == [3 if launcher == "torchrun" else 1]


def test_fits_of_one_second_have_folders_of_their_own(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    assert [run("topics", "fit", path, *FIELDS, "--launcher", "inline") for _ in range(2)] == [0, 0]
    assert sorted(os.listdir("runs")) == ["topics-20260101-000000", "topics-20260101-000000-2"]


def test_other_words_are_found_by_their_names_or_refused(folder, capsys, tmp_path):
    other = tmp_path / "docword.other.txt"
    write(generate(documents=5, vocabulary=70, topics=2, seed=0).corpus, other, "uci")
    assert "over 70 words" in refused(capsys, "topics", "evaluate", folder, other)
    names = tmp_path / "vocab.other.txt"
    names.write_text("".join(f"strange{v}\n" for v in range(70)))
    assert "have no word of" in refused(capsys, "topics", "evaluate", folder, other)
    names.write_text("".join(f"word{v:03}\n" for v in reversed(range(70))))
    assert run("topics", "evaluate", folder, other) == 0


def test_transform_says_which_row_is_which_document(folder, tmp_path):
    gap = tmp_path / "docword.gap.txt"
    gap.write_text("3\n100\n2\n1 2 5\n3 7 1\n")  # its second document has no word
    assert run("topics", "transform", folder, gap, "--out", tmp_path / "w.npz") == 0
    found = np.load(tmp_path / "w.npz")
    assert found["documents"].tolist() == [0, 2]
    assert len(found["topics"]) == 2


# -- real processes -----------------------------------------------------------------------------------------


def test_a_table_that_cannot_be_completed_leaves_the_earlier_one(folder, path, capsys, tmp_path, monkeypatch):
    def full_disk(file, *_):
        file.write("document,")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    table = tmp_path / "topics.csv"
    assert run("topics", "transform", folder, path, "--out", table) == 0
    earlier = table.read_text()
    capsys.readouterr()
    monkeypatch.setattr(topics_tables, "_write_csv", full_disk)
    words = ("topics", "transform", str(folder), str(path), "--out")
    assert "topics.csv cannot be written: No space left" in refused(capsys, *words, str(table))
    assert "new.csv cannot be written: No space left" in refused(capsys, *words, str(tmp_path / "new.csv"))
    assert [file.read_text() for file in tmp_path.iterdir()] == [earlier]


def start(path, folder, *more):
    return session(
        [sys.executable, "-m", "murmurate", "topics", "fit", path, *FIELDS, "--out", folder, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def records(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[:-1]] if path.exists() else []


def documents(folder, replica):
    """How many a replica has recorded."""
    mine = [record for record in records(folder) if record.get("replica") == replica and "eta" in record]
    return mine[-1]["env_steps"] if mine else 0


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        pytest.param("hogwild", 1, marks=pytest.mark.slow),
        ("dpsgd", 0),
        pytest.param("dpsgd", 1, marks=pytest.mark.slow),
        pytest.param("gala", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_is_named_and_the_others_go_on(path, tmp_path, capsys, strategy, victim):
    folder = tmp_path / "run"
    more = ("--strategy", strategy, "--replicas", 2, "--env-steps", 10**9, "--record-every-seconds", 0.2)
    with start(path, folder, *more) as process:

        def waited(condition):
            until(lambda: condition() or process.poll() is not None)
            assert process.poll() is None, process.communicate()[0]

        waited(lambda: documents(folder, 1) > 0 and documents(folder, 0) > 0)
        roles = [json.loads(line) for line in (folder / "roles.jsonl").read_text().splitlines()]
        os.kill(
            next(r["pid"] for r in roles if r["role"] == "replica" and r["index"] == victim), signal.SIGKILL
        )
        waited(lambda: any(record.get("event") == "died" for record in records(folder)))
        enough = documents(folder, 1 - victim) + 1_000  # to know their topics
        waited(lambda: documents(folder, 1 - victim) >= enough)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130, said
    assert summary(folder)["dead_replicas"] == [victim]
    capsys.readouterr()
    assert run("eval", folder, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"] < 50


def test_a_killed_run_is_resumed(path, tmp_path):
    folder = tmp_path / "run"
    with start(path, folder, "--env-steps", 10**9, "--checkpoint-every-env-steps", 5000) as process:
        until(lambda: (folder / "checkpoints" / "last" / "state.json").exists())
        process.kill()
        process.wait()
    saved = json.loads((folder / "checkpoints" / "last" / "state.json").read_text())["env_steps"]
    assert run("resume", folder, "--env-steps", saved + 5000, "--launcher", "inline") == 0
    (resumed,) = [record for record in records(folder) if record.get("event") == "resumed"]
    assert resumed["message"].startswith(f"resumed at {saved:,} ")
    assert summary(folder)["env_steps"] >= saved + 5000
    assert summary(folder)["perplexity"] < 50


def test_a_simulated_cluster_finds_topics_too(path, tmp_path):
    arguments = ("--world.path", path, "--agent.topics", K, "--agent.batch", 32, "--strategy", "dpsgd")
    more = ("--strategy.threads", 1, "--replicas", 3, "--updates", 20, "--out", tmp_path / "run")
    assert run("simulate", "corpus-lda", *arguments, *more) == 0
    facts = summary(tmp_path / "run")
    assert facts["perplexity"] < 60
    assert facts["virtual_seconds"] > 0
