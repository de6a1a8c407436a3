"""Runs that were made with other files, versions of packages or machines, shown together."""

from __future__ import annotations

from pathlib import Path

from a_run_folder import write_records

from murmurate.record import comparison
from murmurate.record.differences import machine, notes
from murmurate.record.groups import grouped
from murmurate.record.report import report
from murmurate.record.runs import RecordedRun, open_run

RECORD = {"time_seconds": 1.0, "replica": 0, "env_steps": 100, "updates": 10}
OLD, NEW = {"/a/mine.py": "1", "/a/env.py": "2"}, {"/b/mine.py": "3", "/b/env.py": "2"}


def a_run(folder: Path, **of_run) -> RecordedRun:
    strategy = of_run.pop("strategy", {"name": "mine"})
    write_records(folder, [RECORD], replicas=1, strategy=strategy, **of_run)
    return open_run(folder)


def test_runs_of_an_edited_file_are_a_group_of_their_own(tmp_path: Path) -> None:
    made = [("old/seed-0", 0, OLD), ("new/seed-0", 0, NEW), ("old/seed-1", 1, OLD), ("new/seed-1", 1, NEW)]
    runs = [a_run(tmp_path / name, seed=seed, files=files) for name, seed, files in made]
    found = grouped(runs)
    assert [(g.label, [r.folder for r in g.runs]) for g in found] == [
        (f"mine ({tmp_path / name / 'seed-0'})", [tmp_path / name / f"seed-{k}" for k in (0, 1)])
        for name in ("old", "new")
    ]
    assert "Not all runs had the same mine.py; those of one group had." in comparison.table(found)["note"]


def test_files_that_moved_or_that_one_run_lacks_are_no_difference(tmp_path: Path) -> None:
    moved = {path.replace("/a/", "/elsewhere/"): digest for path, digest in OLD.items()}
    runs = [a_run(tmp_path / str(i), files=files) for i, files in enumerate((OLD, moved))]
    runs += [a_run(tmp_path / "none")]
    (group,) = grouped(runs)
    assert group.label == "mine"
    assert notes(runs) == []


def test_other_strategies_may_have_other_files_of_one_name(tmp_path: Path) -> None:
    files = {"a": {"/a/strategy.py": "1", "/env.py": "3"}, "b": {"/b/strategy.py": "2", "/env.py": "4"}}
    runs = [a_run(tmp_path / name, strategy={"name": name}, files=files[name]) for name in files]
    assert notes(runs) == ["Not all runs had the same env.py; those of one group had."]


def test_other_versions_and_machines_are_named(tmp_path: Path) -> None:
    first = {"hardware": {"cpu": "EPYC", "cores": 2, "gpus": []}, "versions": {"torch": "2.13", "numpy": "2"}}
    other = {"hardware": {"cpu": "Xeon", "cores": 1, "gpus": ["H200"]}, "versions": {"torch": "2.12"}}
    runs = [a_run(tmp_path / str(i), seed=i, **made) for i, made in enumerate((first, first, other))]
    assert len(grouped(runs)) == 1
    assert notes(runs) == [
        "Not all runs had the same versions: torch 2.13 (2 runs), 2.12 (1 run).",
        "The runs were on different machines, on which seconds and speeds depend: EPYC, 2 cores (2 runs); "
        "Xeon, 1 core, H200 (1 run).",
    ]
    page = report([run.folder for run in runs], tmp_path / "page.html").read_text()
    assert " · EPYC, 2 cores; Xeon, 1 core, H200" in page
    assert "Not all runs had the same versions" in page
    assert notes(runs[:2]) == []
    assert machine(a_run(tmp_path / "unknown")) == ""


def test_runs_of_one_seed_in_a_group_are_named(tmp_path: Path) -> None:
    seeds = [("solo", 0), ("solo", 3), ("solo", 3), ("gala", 0)]
    runs = [a_run(tmp_path / str(i), seed=k, strategy={"name": name}) for i, (name, k) in enumerate(seeds)]
    assert "Several runs of solo have the seed 3" in comparison.table(grouped(runs))["note"]
    assert "have the seed" not in comparison.table(grouped([runs[0], *runs[2:]]))["note"]


def test_the_seconds_of_a_simulated_run_depend_on_no_machine(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / cpu, hardware={"cpu": cpu}, simulated={}) for cpu in ("EPYC", "Xeon")]
    assert notes(runs) == []
