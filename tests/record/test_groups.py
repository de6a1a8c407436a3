"""Groups of runs: what makes one, and how it is labelled."""

from __future__ import annotations

import json
from pathlib import Path

from a_run_folder import a_run, line, write_run

from murmurate.record.groups import grouped
from murmurate.record.report import report
from murmurate.record.runs import open_run


def test_seeds_make_a_group_and_labels_name_just_what_differs(tmp_path: Path) -> None:
    records = [line(1.0, 0)]
    made = [
        ({"name": "gala", "topology": "ring"}, {"seed": 1, "replicas": 2, "hardware": {"cpu": "a"}}),
        ({"name": "local-sgd", "period": 5}, {"seed": 1, "replicas": 2}),
        ({"name": "gala", "topology": "ring"}, {"seed": 2, "replicas": 2, "hardware": {"cpu": "b"}}),
        ({"name": "local-sgd", "period": 10}, {"seed": 1, "replicas": 2}),
        ({"name": "gala", "topology": "ring"}, {"seed": 1, "replicas": 4}),
    ]
    runs = [
        open_run(a_run(tmp_path / str(i), records, strategy, **more))
        for i, (strategy, more) in enumerate(made)
    ]
    found = grouped(runs)
    assert [(g.label, [r.folder.name for r in g.runs]) for g in found] == [
        ("gala, 2 replicas", ["0", "2"]),
        ("local-sgd, 2 replicas, period 5", ["1"]),
        ("local-sgd, 2 replicas, period 10", ["3"]),
        ("gala, 4 replicas", ["4"]),
    ]
    assert [g.index for g in found] == [0, 1, 2, 3]
    assert [g.label for g in grouped([runs[0], runs[2]])] == ["gala"]
    other = open_run(a_run(tmp_path / "r", records, made[0][0], recipe="pong-gala"))
    assert [g.label for g in grouped([runs[0], other])] == ["cartpole-gala, gala", "pong-gala, gala"]
    # what another recipe brings with it goes without saying, what runs of one recipe differ in does not
    more = [
        open_run(a_run(tmp_path / f"m{n}", records, made[0][0], recipe="pong-gala", simulators=n))
        for n in (8, 16)
    ]
    assert [g.label for g in grouped([runs[0], *more])] == [
        "cartpole-gala, gala",
        "pong-gala, gala, simulators 8",
        "pong-gala, gala, simulators 16",
    ]
    none = open_run(a_run(tmp_path / "none", records, made[0][0], recipe="pong-gala", simulators=None))
    assert [g.label for g in grouped([more[0], none])] == ["gala, simulators 8", "gala"]


def test_groups_that_differ_by_a_setting_that_one_lacks_are_told_apart_by_their_folders(
    tmp_path: Path,
) -> None:
    settings = ({}, {"parts": [1]}, {"parts": [1], "compression": "none"})  # as of three versions
    folders = [
        a_run(tmp_path / str(version) / "seed-0", [line(1.0, 0)], {"name": "gala"}, **more)
        for version, more in enumerate(settings)
    ]
    labels = [group.label for group in grouped([open_run(folder) for folder in folders])]
    assert labels == [f"gala ({folder})" for folder in folders]


def test_labels_leave_out_the_folders_of_environments(tmp_path: Path) -> None:
    names = [f"env:/home/me/tasks/arm.py:{function}-td3" for function in ("make_env", "make_easy")]
    folders = [a_run(tmp_path / name[-8:], [line(1.0, 0)], {"name": "gala"}, recipe=name) for name in names]
    runs = [open_run(folder) for folder in folders]
    labels = ["env:arm.py:make_env-td3, gala", "env:arm.py:make_easy-td3, gala"]
    assert [group.label for group in grouped(runs)] == labels
    assert runs[0].label == "env:arm.py:make_env-td3, gala, 2 replicas"


def test_how_curves_are_drawn_is_no_setting_of_a_run(tmp_path: Path) -> None:
    """Two versions of the package may word the title of a curve in two ways."""
    for title in ("Accuracy", "Accuracy of validation images"):
        write_run(folder := tmp_path / title)
        stored = json.loads((folder / "run.json").read_text())
        curve = {"metric": "accuracy", "title": title, "label": "share", "text": "words"}
        stored |= {"curves": [curve], "headline": curve}
        (folder / "run.json").write_text(json.dumps(stored))
    runs = [open_run(folder) for folder in sorted(tmp_path.iterdir())]
    assert [group.label for group in grouped(runs)] == ["gala"]
    page = report([runs[0].folder], tmp_path / "page.html").read_text()
    assert "metric accuracy" not in page


def test_runs_that_start_from_several_seeds_of_one_run_are_a_group(tmp_path: Path) -> None:
    initials = ("/runs/base/seed-0", "/runs/base/seed-12", "/runs/wide/seed-0", None)
    runs = [
        open_run(a_run(tmp_path / str(i), [line(1.0, 0)], {"name": "gala"}, initial=initial, seed=i))
        for i, initial in enumerate(initials)
    ]
    assert [(group.label, len(group.runs)) for group in grouped(runs)] == [
        ("gala, initial /runs/base/seed-*", 2),
        ("gala, initial /runs/wide/seed-*", 1),
        ("gala", 1),
    ]


def test_runs_in_several_places_are_one_group(tmp_path: Path) -> None:
    places = ({"launcher": "local", "loggers": []}, {"launcher": "ray", "imports": ["mine"]})
    folders = [
        a_run(tmp_path / str(i), [line(1, 0)], {"name": "solo"}, **place) for i, place in enumerate(places)
    ]
    assert len(grouped([open_run(folder) for folder in folders])) == 1


def test_a_seed_on_each_gpu_is_one_group_and_a_gpu_is_no_cpu(tmp_path: Path) -> None:
    places = [
        {
            "seed": seed,
            "placement": {"devices": [f"cuda:{seed}"], "threads": 1},
            "record_every_seconds": 1.0 + seed,
            "restarts": seed,
            "hang_after_seconds": 120.0 + seed,
            "replay": {"folder": f"/scratch/{seed}", "capacity": 1000},
        }
        for seed in (0, 11)
    ]
    places.append(places[0] | {"placement": {"devices": ["cpu"], "threads": 1}})
    runs = [
        open_run(a_run(tmp_path / str(i), [line(1.0, 0)], {"name": "solo"}, **place))
        for i, place in enumerate(places)
    ]
    assert [(g.label, len(g.runs)) for g in grouped(runs)] == [
        ("solo, devices ['cuda']", 2),
        ("solo, devices ['cpu']", 1),
    ]
