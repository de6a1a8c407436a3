"""Scores of several runs: statistics against enumeration, and what a comparison shows of them."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from a_run_folder import write_run

from murmurate.cli.main import main
from murmurate.record import score_statistics
from murmurate.record.groups import grouped
from murmurate.record.report import report
from murmurate.record.runs import open_run
from murmurate.record.score_sections import score_sections
from murmurate.record.score_statistics import probability_of_improvement, summarized

pytest.importorskip("scipy")


def test_means_and_their_intervals_are_those_of_all_resamples() -> None:
    scores = [1.0, 2.0, 4.0, 9.0]
    found = summarized(scores)
    assert (found.runs, found.mean, found.iqm) == (4, 4.0, 3.0)
    every = np.array(list(itertools.product(scores, repeat=4)))
    expected = np.quantile(every.mean(1), [0.025, 0.975])
    np.testing.assert_allclose(found.mean_interval, expected, atol=0.3)
    middle = np.sort(every, 1)[:, 1:3].mean(1)
    np.testing.assert_allclose(found.iqm_interval, np.quantile(middle, [0.025, 0.975]), atol=0.3)
    one = summarized([5.0])
    assert (one.mean, one.iqm, one.stderr, one.mean_interval, one.iqm_interval) == (
        5.0,
        5.0,
        None,
        None,
        None,
    )
    with pytest.raises(ValueError, match="no scores"):
        summarized([])


@pytest.mark.parametrize("seed", range(3))
def test_probability_of_improvement_counts_pairs(seed: int) -> None:
    generator = np.random.default_rng(seed)
    ours, theirs = generator.integers(0, 5, 6).tolist(), generator.integers(0, 5, 4).tolist()
    pairs = list(itertools.product(ours, theirs))
    expected = sum(1.0 if x > y else 0.5 if x == y else 0.0 for x, y in pairs) / len(pairs)
    chance, interval = probability_of_improvement(ours, theirs)
    assert chance == pytest.approx(expected)
    assert interval is not None
    assert interval[0] <= chance <= interval[1]
    assert probability_of_improvement(theirs, ours)[0] == pytest.approx(1 - expected)
    assert probability_of_improvement([1.0], [2.0, 3.0]) == (0.0, None)


def test_the_pairs_of_many_runs_are_compared_in_bounded_memory() -> None:
    scores = np.arange(200.0).tolist()
    tracemalloc.start()
    try:
        chance, _ = probability_of_improvement(scores, scores)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chance == 0.5
    assert peak < 2e8  # all pairs of 500 resamples, as for a few runs, would be 1.6e8 bytes, several times


def _groups(tmp_path: Path, **scores: list[float]) -> list[Path]:
    folders = []
    for name, of in scores.items():
        for seed, score in enumerate(of):
            folder = tmp_path / f"{name}-{seed}"
            write_run(folder, seconds=60, dead=None, seed=seed, strategy={"name": name.replace("_", "-")})
            summary = json.loads((folder / "summary.json").read_text())
            (folder / "summary.json").write_text(json.dumps(summary | {"eval_return_mean": score}))
            folders.append(folder)
    return folders


def test_a_comparison_of_seeds_has_intervals_and_pairs(tmp_path: Path) -> None:
    folders = _groups(tmp_path, gala=[18.0, 19.0, 20.0, 21.0], all_reduce=[10.0, 11.0, 19.0, 12.0])
    scores, improvement = score_sections(grouped([open_run(folder) for folder in folders]))
    assert scores.table is not None
    first, second = scores.table[1]
    assert first[:3] == ["gala", "4", "19.50"]
    assert first[5] == "19.50"
    assert second[:3] == ["all-reduce", "4", "13"]
    assert second[5] == "11.50"  # of 11 and 12
    assert "91%" in improvement.figures[0]  # 14 of 16 pairs, and one tie
    page = report(folders, tmp_path / "page.html").read_text()
    assert "Scores over runs" in page
    assert "Probability of improvement" in page
    assert "Training return, sampled" in page


def test_only_runs_in_one_environment_are_compared(tmp_path: Path) -> None:
    pong = _groups(tmp_path / "pong", gala=[18.0, 19.0], all_reduce=[10.0, 11.0])
    qbert = _groups(tmp_path / "qbert", gala=[900.0, 910.0])
    for folder in (*pong, *qbert):
        stored = json.loads((folder / "run.json").read_text())
        world = {"game": folder.parent.name, "frame_skip": 4}
        (folder / "run.json").write_text(json.dumps(stored | {"world": world}))
    groups = grouped([open_run(folder) for folder in (*pong, *qbert)])
    assert [group.world for group in groups] == ["pong", "pong", "qbert"]
    _, improvement = score_sections(groups)
    assert improvement.text.endswith("Runs in different environments are not compared.")
    assert improvement.figures[0].count("%") == score_sections(groups[:2])[1].figures[0].count("%")
    assert len(score_sections(groups[1:])) == 1  # no pair, no section


def test_the_numbers_of_a_page_are_also_a_file(tmp_path: Path) -> None:
    folders = _groups(tmp_path, gala=[18.0, 19.0, 20.0, 21.0], all_reduce=[10.0, 11.0, 19.0, 12.0])
    page, file = tmp_path / "page.html", tmp_path / "numbers.json"
    words = ["report", *map(str, folders), "--out", str(page), "--json", str(file)]
    assert main(words) == 0
    numbers = json.loads(file.read_text())
    embedded = page.read_text().split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert json.loads(embedded) == {k: v for k, v in numbers.items() if k not in ("curves", "evaluations")}
    assert [run["eval_return_mean"] for run in numbers["runs"]] == [18, 19, 20, 21, 10, 11, 19, 12]
    gala, _ = numbers["groups"]
    assert (gala["group"], gala["figure"], gala["mean"]) == ("gala", "eval_return_mean", 19.5)
    assert gala["folders"] == [str(folder) for folder in folders[:4]]
    assert gala["reached"]["runs"] == 4
    assert gala["wall_seconds"] == 60
    first, second = numbers["scores"]
    assert (first["group"], first["runs"], first["iqm"], second["iqm"]) == ("gala", 4, 19.5, 11.5)
    low, high = second["iqm_interval"]
    assert 10 <= low < 11.5 < high <= 19
    (pair,) = numbers["improvements"]
    assert (pair["group"], pair["over"], pair["probability"]) == ("gala", "all-reduce", 14.5 / 16)
    written = page.read_text()
    assert main([*words[:-1], str(page.parent / "." / page.name)]) == 2
    assert page.read_text() == written
    report(folders[:1], page, numbers=file)
    assert json.loads(file.read_text()).keys() == {"runs"}
    assert main([*words[:-1], str(tmp_path / "nowhere" / "numbers.json")]) == 2


def test_single_runs_have_no_intervals(tmp_path: Path) -> None:
    folders = _groups(tmp_path, gala=[18.0], all_reduce=[10.0])
    assert score_sections(grouped([open_run(folder) for folder in folders])) == []


def test_without_scipy_the_page_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    folders = _groups(tmp_path, gala=[18.0, 19.0])
    monkeypatch.setattr(score_statistics, "available", lambda: False)
    (section,) = score_sections(grouped([open_run(folder) for folder in folders]))
    assert "pip install 'murmurate[topics]'" in section.text
