"""The accuracy on test images: which of them it is of, and what is said about the others."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import murmurate
from murmurate.cli.main import main
from murmurate.datasets.image_folder import other_images
from murmurate.evaluation.accuracy import Accuracy, _by_class
from murmurate.recipes import recipe
from murmurate.training.restore import load_agent
from murmurate.training.run import Run
from pictures import write_folder
from short_runs import altered, refused, train

VALIDATION = ("validation_images", "validation_accuracy", "validation_loss")
ALL = {"accuracy": 0.25, "top5_accuracy": 0.5, "test_images": 52, "classes": 10}


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({}, "Accuracy on 52 test images: 25.00% (top 5: 50.00%)"),
        ({"classes": 6}, "Accuracy on 52 test images: 25.00% (top 5: 50.00%)"),
        ({"classes": 5}, "Accuracy on 52 test images: 25.00%"),
        (
            {"test_images_found": 52, "test_images_skipped": 0, "classes": 2},
            "Accuracy on 52 test images: 25.00%",
        ),
        ({"test_images_found": 1000, "classes": 2}, "Accuracy on 52 of 1,000 test images: 25.00%"),
        (
            {"test_images_found": 53, "test_images_skipped": 1, "classes": 2},
            "Accuracy on 52 of 53 test images (1 could not be read): 25.00%",
        ),
        (
            {"accuracy": None, "test_images": 0, "test_images_found": 3, "test_images_skipped": 3},
            "None of 3 test images could be read",
        ),
        ({"balanced_accuracy": 0.255, "classes": 2}, "Accuracy on 52 test images: 25.00%"),
        (
            {"balanced_accuracy": 0.1},
            "Accuracy on 52 test images: 25.00% (top 5: 50.00%; mean over the classes: 10.00%)",
        ),
        ({"accuracy": None, "test_images": 0, "test_images_found": 0, "test_images_skipped": 0}, ""),
        ({"accuracy": None}, ""),
    ],
)
def test_the_sentence_says_of_how_many_images(figures: dict[str, Any], sentence: str) -> None:
    assert Accuracy().sentence(ALL | figures) == sentence


def test_the_sentence_of_an_earlier_version_s_figures() -> None:
    figures = {name: value for name, value in ALL.items() if name != "classes"}
    assert Accuracy().sentence(figures) == "Accuracy on 52 test images: 25.00% (top 5: 50.00%)"
    assert Accuracy().sentence({}) == ""


def test_figures_of_classes_are_right_whatever_the_others_are() -> None:
    labels, predicted = np.array([0] * 8 + [1, 1]), np.array([0] * 8 + [0, 1])
    found = _by_class(labels, predicted, 3)
    assert found["class_recall"] == [1, 0.5, None]  # no test image is of the third
    assert found["balanced_accuracy"] == 0.75  # and the accuracy is 0.9
    assert found["confusion"] == [[8, 0, 0], [1, 1, 0], [0, 0, 0]]
    many = _by_class(labels, predicted, 101)
    assert many["confusion"] is None
    assert many["class_recall"][:3] == found["class_recall"]


def short(path: Path) -> Run:
    run = recipe("folder-resnet18")
    world = dataclasses.replace(run.world, path=str(path), size=32, shortest=36, validation=0)  # type: ignore[type-var]
    learner = dataclasses.replace(run.learner, width=4, batch=3, schedule="constant", warmup=0.0)  # type: ignore[type-var, call-arg]
    limits = {"launcher": "inline", "env_steps": None, "updates": 1, "workers": 0}
    return altered(run, world=world, learner=learner, **limits)


def test_some_images_by_seed_moved_images_and_broken_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cv2")
    path, folder, moved = tmp_path / "images", tmp_path / "run", tmp_path / "moved"
    write_folder(path, train=6, test=12)
    broken = path / "val" / "class1" / "00004.jpg"
    broken.write_bytes(broken.read_bytes()[:-30])
    finish = train(short(path), folder)
    assert "its end is missing" in finish.summary["exit"]  # type: ignore[index]
    shutil.move(path, moved)
    capsys.readouterr()
    assert "--world.path NEW" in refused(capsys, "eval", folder)
    assert "its end is missing" in refused(capsys, "eval", folder, "--world.path", moved)

    there = ["eval", "--world.path", str(moved), str(folder), "--world.skip-bad"]
    before = (folder / "run.json").read_bytes()
    assert main(there) == 0
    assert capsys.readouterr().out.startswith("Accuracy on 11 of 12 test images (1 could not be read): ")
    assert (folder / "run.json").read_bytes() == before
    figures = []
    for _ in range(2):
        assert main([*there, "true", "--episodes", "5", "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0] == figures[1]
    assert figures[0]["test_images"] + figures[0]["test_images_skipped"] == 5
    assert figures[0]["test_images_found"] == 12
    confusion, recall = figures[0]["confusion"], figures[0]["class_recall"]
    assert [len(row) for row in confusion] == [3, 3, 3]
    assert sum(map(sum, confusion)) == figures[0]["test_images"]
    assert recall == [row[k] / sum(row) if sum(row) else None for k, row in enumerate(confusion)]

    model = murmurate.load(folder, world={"path": str(moved), "skip_bad": True})
    assert model.evaluate(5)["accuracy"] == figures[0]["accuracy"]
    assert model.evaluate()["test_images_skipped"] == 1


def test_figures_of_validation_images_stand_beside_those_of_test_images(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    run = short(Path(write_folder(tmp_path / "images", train=24, test=6)))
    summary = train(run, tmp_path / "none").summary
    assert summary is not None
    assert [summary[name] for name in VALIDATION] == [0, None, None]

    run = altered(run, world=dataclasses.replace(run.world, validation=9))  # type: ignore[type-var]
    summary = train(run, tmp_path / "run").summary
    assert summary is not None
    learner = load_agent(run, tmp_path / "run" / "checkpoints" / "last")
    expected = learner.figures(run.world.divided().validation)  # type: ignore[attr-defined]
    assert [summary[name] for name in VALIDATION] == [9, expected["accuracy"], expected["loss"]]


def test_images_that_are_not_of_the_run_are_read_to_be_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cv2")
    train(short(Path(write_folder(tmp_path / "images", train=6, test=12))), tmp_path / "run")
    model = murmurate.load(tmp_path / "run")
    files = sorted((tmp_path / "images" / "val").glob("*/*.jpg"))
    labels = [model.classes.index(file.parent.name) for file in files]
    right = model.predict(model.run.world.images(files)) == labels  # type: ignore[attr-defined]
    assert right.mean() == pytest.approx(model.evaluate()["accuracy"])
    with pytest.raises(murmurate.Refusal, match=r"model.run.world.images\(files\) reads image files"):
        model.predict(str(files[0]))

    # another folder, in which one class lacks images, without the run's own
    others = tmp_path / "others"
    (tmp_path / "images").rename(tmp_path / "gone")
    write_folder(others, train=9, test=3)
    capsys.readouterr()
    said = refused(capsys, "eval", tmp_path / "run", "--world.path", others)
    assert "use murmurate eval DIR --images FOLDER (docs/images.md)" in said
    shutil.rmtree(others / "train" / "class1")
    files = sorted((others / "train").glob("*/*.jpg"))
    labels = [model.classes.index(file.parent.name) for file in files]
    predicted = model.predict(model.run.world.images(files))  # type: ignore[attr-defined]
    figures = model.evaluate(images=others / "train")
    assert figures["accuracy"] == pytest.approx((predicted == labels).mean())
    assert [figures[name] for name in ("test_images", "validation_images", "classes")] == [6, 0, 3]
    assert [figures["class_recall"][k] is None for k in range(3)] == [False, True, False]
    folder = tmp_path / "run"
    assert main(["eval", str(folder), "--images", str(others / "train"), "--json", "--episodes", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["test_images"] == 4
    for words, images in (
        (f"There is no class train, as {others / 'train'} is named", others),
        ("is no folder. Name the one with a folder of each class", files[0]),
    ):
        assert words in refused(capsys, "eval", folder, "--images", images)
    broken = files[0]
    broken.write_bytes(broken.read_bytes()[:-30])
    assert "its end is missing" in refused(capsys, "eval", folder, "--images", others / "train")
    assert main(["eval", str(folder), "--images", str(others / "train"), "--world.skip-bad"]) == 0
    assert "Accuracy on 5 of 6 test images (1 could not be read)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fashion-resnet20", "cartpole-a2c"])
def test_images_of_files_are_refused_where_the_run_did_not_learn_from_any(name: str, tmp_path: Path) -> None:
    with pytest.raises(murmurate.Refusal, match=r"--images \(images in Python\) is for runs on image files"):
        other_images(recipe(name).world, tmp_path, None)


def test_what_else_is_given_about_the_world_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cv2")
    write_folder(tmp_path / "images", train=6, test=3)
    summary = train(short(tmp_path / "images"), tmp_path / "run").summary
    assert summary is not None
    assert (summary["test_images"], summary["test_images_skipped"]) == (3, 0)
    capsys.readouterr()
    for words, *options in (
        (
            "--world.vocabulary cannot be given for the world folder: --world.path, ",
            "--world.vocabulary",
            "x",
        ),
        ("'maybe' is neither true nor false", "--world.skip-bad", "maybe"),
        ("eval has no option --world.size", "--world.size", "8"),
    ):
        assert words in refused(capsys, "eval", tmp_path / "run", *options)
    for world in ({"size": 8}, {"pth": "x"}):
        with pytest.raises(murmurate.Refusal, match=r"world.path, world.skip_bad may be given"):
            murmurate.load(tmp_path / "run", world=world)
