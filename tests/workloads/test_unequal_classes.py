"""Image classifiers of classes of unequal size: weights from the numbers of training images."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from murmurate.cli.main import main
from murmurate.datasets.image_fashion import FashionWorld
from murmurate.datasets.image_set import ImageBatch, ImageData
from murmurate.errors import Refusal
from murmurate.losses.classification import balanced_weights, classification_loss
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec
from murmurate.training.memory import bytes_of, planned_bytes
from murmurate.training.run_folder import plain, restore
from murmurate.workloads.image_classifier import ImageClassifier
from training.test_part_processes import arguments, digits, losses

COUNTS = (5, 30, 10)
SPEC = EnvSpec("images", (3, 8, 8), torch.uint8, actions=3, channels=3, examples=45, class_counts=COUNTS)
CONFIG = ImageClassifier(
    width=4, batch=8, precision="float32", schedule="constant", validate_every=0, class_weights="balanced"
)


def batch() -> Batch:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    return Batch(ImageBatch.of(pixels, np.array([0, 1, 1, 1, 2, 1, 2, 0])))


def test_the_loss_is_weighted_by_the_worlds_counts() -> None:
    learner = CONFIG.build(Context(SPEC, Replica, 3))
    data = batch().data
    with torch.no_grad():
        logits = learner.net(learner._normalised(data.images))
    expected = classification_loss(logits, data.labels, weight_k=balanced_weights(COUNTS))
    assert float(learner.learn(batch()).read_metrics()["loss"]) == pytest.approx(float(expected), rel=1e-5)
    unweighted = classification_loss(logits, data.labels)
    assert float(unweighted) != pytest.approx(float(expected), rel=1e-3)


def test_a_world_that_counts_no_classes_is_refused() -> None:
    with pytest.raises(Refusal, match=r"EnvSpec\.class_counts.* --agent\.class-weights balanced"):
        CONFIG.build(Context(dataclasses.replace(SPEC, class_counts=()), Replica, 3))
    CONFIG.build(Context(dataclasses.replace(SPEC, class_counts=None), Replica, 3))  # as a saved model is


def test_such_a_world_is_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ImageData, "class_counts", lambda self, chosen: ())
    command = arguments(tmp_path, "run", "--dry-run")
    assert main(command) == 0
    assert main([*command, "--agent.class-weights", "balanced"]) == 2
    assert "this data set does not say how many images each class has" in capsys.readouterr().err


def test_the_size_of_weighted_runs_is_planned(tmp_path: Path) -> None:
    world = FashionWorld(path=str(digits(tmp_path / "images")), validation=100)
    run = dataclasses.replace(recipe("fashion-resnet20"), world=world, learner=CONFIG)
    learner = CONFIG.build(Context(world.spec(), Replica, 3))
    assert planned_bytes(run) == bytes_of(learner) > 0


def test_a_world_counts_the_images_that_are_trained_on(tmp_path: Path) -> None:
    world = FashionWorld(path=str(digits(tmp_path / "images")), validation=100)
    train = world.divided().train
    labels = Counter(train.select(np.arange(len(train))).labels.tolist())
    assert world.spec().class_counts == tuple(labels[k] for k in range(10))
    assert world.spec(world.fingerprint()).class_counts is None


def test_a_run_folder_without_the_field_is_read() -> None:
    stored = plain(CONFIG)
    del stored["class_weights"]
    missing: list[str] = []
    assert restore(CONFIG, stored, 9, missing).class_weights == "balanced", "that of the recipe"
    assert missing == ["class_weights"]
    with pytest.raises(TypeError, match="class_weights is missing"):
        restore(CONFIG, stored, 10, [])


@pytest.mark.slow
def test_parts_weight_as_the_whole(tmp_path: Path) -> None:
    ends = ("--updates", "3", "--launcher", "inline", "--agent.class-weights", "balanced")
    assert main(arguments(tmp_path, "whole", *ends)) == 0
    assert main(arguments(tmp_path, "parts", *ends, "--parts", "2")) == 0
    whole, parts = losses(tmp_path / "whole")[0], losses(tmp_path / "parts")[0]
    assert whole.keys() == parts.keys()
    for update, loss in whole.items():
        assert parts[update] == pytest.approx(loss, rel=5e-4)
