"""Runs on a folder of images: stopped in the middle of a pass and resumed, with other decoding processes."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import pytest

from laws.problems import same
from murmurate.errors import Refusal
from murmurate.recipes import recipe
from murmurate.training import checkpoint
from pictures import write_folder, write_shards
from short_runs import altered, resume, train

pytest.importorskip("cv2")


def replicas(folder: Path) -> list[object]:
    """Vectors and optimizers of both replicas, and what each of them will see next."""
    last = folder / "checkpoints" / "last"
    parts = [checkpoint.read_part(last, rank) for rank in range(2)]
    return [[part["replicas"], part["source"], part["learner"]] for part in parts]


def short(path: str, **changes):
    run = recipe("shards-resnet18" if path.endswith(".tar") else "folder-resnet18")
    world = dataclasses.replace(run.world, path=path, size=32, shortest=36, validation=0, test=2)
    learner = dataclasses.replace(run.learner, width=4, batch=3, schedule="constant", warmup=0.0)
    run = altered(run, world=world, learner=learner, launcher="inline", replicas=2, env_steps=None, updates=9)
    return altered(run, **changes)


def test_stopped_within_a_pass_and_resumed_with_other_processes_equals_uninterrupted(tmp_path):
    """22 images on two replicas: the stop comes within the second pass."""
    path = write_folder(tmp_path / "images", train=22, test=2)
    train(short(path, workers=0), tmp_path / "whole")
    train(short(path, workers=2, updates=5), tmp_path / "parts")
    state = checkpoint.read_part(tmp_path / "parts/checkpoints/last", 0)["source"]
    assert state == {"passes": 1, "place": 4, "skipped": {}}
    # as on another machine, where the folder is elsewhere
    moved = shutil.move(tmp_path / "images", tmp_path / "moved")
    finish = resume(
        tmp_path / "parts",
        lambda run: altered(
            run, updates=9, workers=1, prefetch=1, world=dataclasses.replace(run.world, path=str(moved))
        ),
    )
    assert finish.code == 0
    assert same(replicas(tmp_path / "whole"), replicas(tmp_path / "parts"))


def test_a_broken_image_fails_the_run_by_name_or_is_left_out(tmp_path):
    path = write_folder(tmp_path / "images", train=22, test=2)
    broken = tmp_path / "images" / "train" / "class1" / "00007.jpg"
    broken.write_bytes(broken.read_bytes()[:-30])
    run = short(path, workers=1, replicas=1)
    finish = train(run, tmp_path / "run")
    assert finish.code == 1
    assert finish.summary["exit"].startswith(f"failed: {broken}: its end is missing")
    skipping = dataclasses.replace(run, world=dataclasses.replace(run.world, skip_bad=True))
    assert train(skipping, tmp_path / "skipping").code == 0
    events = [json.loads(line) for line in (tmp_path / "skipping" / "metrics.jsonl").read_text().splitlines()]
    assert any(event.get("event") == "skipped" and str(broken) in event["message"] for event in events)
    assert max(event.get("skipped_images", 0) for event in events) >= 1


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_a_broken_validation_image_fails_the_run_whose_folder_stays(launcher, tmp_path):
    path = write_folder(tmp_path / "images", train=22, test=9)  # so the first validation is after 3 updates
    shutil.copytree(tmp_path / "images" / "val", tmp_path / "images" / "test")
    broken = tmp_path / "images" / "val" / "class1" / "00001.jpg"
    broken.write_bytes(b"no picture")
    run = short(path, workers=0, replicas=1, launcher=launcher)
    run = dataclasses.replace(run, learner=dataclasses.replace(run.learner, validate_every=3))
    finish = train(run, tmp_path / "run")
    assert finish.code == 1
    assert f"{broken}: it begins with" in finish.summary["exit"]


@pytest.mark.parametrize("parts", [(33,), (2, 33)])
def test_more_parts_than_rows_are_refused_before_any_process_starts(parts, tmp_path):
    path = write_folder(tmp_path / "images", train=22, test=2)
    with pytest.raises(
        Refusal, match=f"--parts {' '.join(map(str, parts))} divides images of 32 x 32 pixels"
    ):
        train(short(path, replicas=1, launcher="local", parts=parts), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_shards_are_learned_from_and_resumed_by_their_pattern(tmp_path):
    (tmp_path / "shards").mkdir()
    run = short(write_shards(tmp_path / "shards", count=22), updates=2)
    assert train(run, tmp_path / "run").summary["test_images"] == 2
    assert resume(tmp_path / "run", lambda run: altered(run, updates=3)).code == 0


def test_memory_is_counted_before_it_is_taken(tmp_path):
    path = write_folder(tmp_path / "images", train=6, test=2)
    run = short(path, workers=2, prefetch=3, replicas=1)
    counted = run.source.memory_bytes(run)
    assert 0 < counted - (4 * 3 * 32 * 32 * 3 + 2 * 160 * 2**20) < 2000  # the rest is the index
    huge = dataclasses.replace(run, learner=dataclasses.replace(run.learner, batch=10**9))
    with pytest.raises(Refusal, match="memory"):
        train(huge, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert 2000 < altered(run, workers=0).source.memory_bytes(altered(run, workers=0)) < 20_000


def test_classes_without_a_training_image_are_warned_of(tmp_path):
    run = short(write_folder(tmp_path / "images", train=3, test=3))  # of three classes
    world = dataclasses.replace(run.world, validation=1)
    drawn = altered(run, world=world)
    (missing,) = world.divided().validation.select([0]).labels.tolist()
    with pytest.warns(UserWarning, match=rf"1 of 3 classes .*number {missing}, .*--world.split-seed"):
        drawn.source.memory_bytes(drawn)


def test_crops_that_are_small_parts_of_images_are_warned_of(tmp_path):
    run = short(write_folder(tmp_path / "images", train=6, test=2))
    small, large = (
        altered(run, world=dataclasses.replace(run.world, size=size, shortest=256)) for size in (48, 128)
    )
    with pytest.warns(UserWarning, match="quarter.* --world.shortest 54 --augment.shortest 54 102"):
        small.source.memory_bytes(small)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        large.source.memory_bytes(large)
