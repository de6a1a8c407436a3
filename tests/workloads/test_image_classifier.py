"""The classifier of images: it is a plain loop with torch's own optimizer, and learns."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike

from murmurate.datasets.image_set import ImageBatch, ImageSet
from murmurate.recipes import recipe
from murmurate.record.reader import read_metrics
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.sources.images import ImageSourceConfig
from murmurate.spec import Batch, EnvSpec
from murmurate.strategies import strategies, strategy
from murmurate.training import checkpoint
from murmurate.training.restore import load_agent
from murmurate.workloads import image_classifier
from murmurate.workloads.image_classifier import ClassifierLearner, ImageClassifier
from short_runs import train
from smallest import smallest

SPEC = EnvSpec("images", (3, 8, 8), torch.uint8, actions=4, channels=3, examples=64)
SMALL = ImageClassifier(width=4, batch=16, precision="float32", schedule="constant", validate_every=0)


def images(count: int = 64, seed: int = 0) -> ImageSet:
    """Noise; the quarter of it that is bright is the label."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 160, (count, 8, 8, 3), dtype=np.uint8)
    labels = random.integers(0, 4, count)
    for image, label in zip(pixels, labels, strict=True):
        image[4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 60
    return ImageSet(pixels, labels)


def learner(config: ImageClassifier = SMALL, **context: object) -> ClassifierLearner:
    return config.build(Context(SPEC, Replica, 3, **context))  # type: ignore[arg-type]


def trained(it: ClassifierLearner, updates: int) -> list[float]:
    data = images()
    losses = []
    for k in range(updates):
        batch = data.select(np.arange(16) + 16 * (k % 4))
        losses.append(float(it.learn(Batch(batch)).read_metrics()["loss"]))
    return losses


def test_it_is_a_plain_loop_with_torchs_optimizer() -> None:
    config = ImageClassifier(
        width=4, batch=16, precision="float32", schedule="constant", validate_every=0, weight_decay=0.01
    )
    ours, plain = learner(config), learner(config).net
    decayed = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1 * 16 / 128, momentum=0.9, nesterov=True)
    data, expected = images(), []
    for k in range(20):
        batch = data.select(np.arange(16) + 16 * (k % 4))
        loss = F.cross_entropy(plain((batch.images.float() / 255 - 0.5) / 0.25), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert trained(ours, 20) == pytest.approx(expected, abs=1e-4)


def test_a_long_validation_shows_that_it_goes_on() -> None:
    beats: list[int] = []
    config = dataclasses.replace(SMALL, validate_every=2)
    it = learner(config, validation=images(600), heartbeat=lambda: beats.append(it.clock))
    trained(it, 4)
    assert beats == [2, 2, 2, 4, 4, 4], "250 images at a time"


@pytest.mark.parametrize(
    ("updates", "every", "validated"),
    [
        (None, 3, [3, 6, 9]),
        (10, 3, [2, 4, 6, 8, 10]),  # 32 images are validated, of which two updates learn
        (60, 500, [3, 6, 9]),
        (7, 500, [2, 4, 6, 7, 8, 10]),
        (0, 500, [1, 2, 4, 6, 8, 10]),
    ],
)
def test_short_runs_are_validated_too(updates: int | None, every: int, validated: list[int]) -> None:
    beats: list[int] = []
    config = dataclasses.replace(SMALL, validate_every=every)
    it = learner(config, validation=images(32), own_updates=updates, heartbeat=lambda: beats.append(it.clock))
    trained(it, 10)
    assert beats == validated


def test_replicas_that_share_a_short_run_s_validation_do_so_at_the_same_updates(tmp_path: Path) -> None:
    run = dataclasses.replace(
        smallest("resnet20", tmp_path), replicas=2, env_steps=None, updates=3, launcher="inline"
    )
    run = dataclasses.replace(
        run, learner=dataclasses.replace(cast(ImageClassifier, run.learner), validate_every=500)
    )
    assert train(run, tmp_path / "run").code == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    last = {record["replica"]: record for record in records if "kind" not in record}
    assert last[0]["accuracy"] == last[1]["accuracy"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixup": 0.2, "label_smoothing": 0.1},
        {"batch_norm": "ghost", "ghost": 4},
        {"batch_norm": "replicas"},
        {"precision": "bfloat16"},
    ],
)
def test_it_learns(options: dict[str, object]) -> None:
    fields = {"width": 8, "batch": 16, "precision": "float32", "schedule": "constant", "rate_batch": 16}
    it = learner(ImageClassifier(**(fields | {"learning_rate": 0.05, "validate_every": 0} | options)))  # type: ignore[arg-type]
    trained(it, 32)
    assert it.figures(images())["accuracy"] > 0.9


def test_statistics_over_replicas_in_a_whole_run(tmp_path: Path) -> None:
    """Both replicas have the statistics of both batches."""
    run = smallest("resnet20", tmp_path)
    learner = dataclasses.replace(cast(ImageClassifier, run.learner), batch_norm="replicas")
    run = dataclasses.replace(
        run, learner=learner, replicas=2, env_steps=None, updates=3, launcher="inline", probe_every_updates=0
    )
    assert train(run, tmp_path / "run").code == 0
    parts = [checkpoint.read_part(tmp_path / "run" / "checkpoints" / "last", rank) for rank in range(2)]
    one, other = (part["replicas"]["classifier"]["replica"]["buffers"] for part in parts)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(value.abs().max() > 0 for name, value in one.items() if name.endswith("running_mean"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "parameter-server" else pytest.mark.slow)
        for n in sorted({*strategies()} - {"solo"})
    ],
)
def test_it_learns_under_every_strategy_with_the_mean_of_the_learners_statistics(
    name: str, tmp_path: Path
) -> None:
    """Running statistics are no parameters, so no strategy exchanges them; a centre has none of its own."""
    data = images(160)
    np.savez(tmp_path / "images.npz", images=data.pixels, labels=data.labels)
    run = recipe("arrays-resnet20")
    world = dataclasses.replace(
        cast(Any, run.world), path=str(tmp_path / "images.npz"), test=64, validation=0
    )
    config = dataclasses.replace(SMALL, learning_rate=0.05, rate_batch=0)
    run = dataclasses.replace(
        run, world=world, learner=config, strategy=strategy(name)(), source=ImageSourceConfig(), replicas=2,
        launcher="inline", env_steps=None, updates=40, probe_every_updates=0,
    )  # fmt: skip
    finish = train(run, tmp_path / "run")
    assert finish.summary is not None
    assert finish.summary["accuracy"] > 0.9
    last = tmp_path / "run" / "checkpoints" / "last"
    saved = [checkpoint.read_part(last, rank)["replicas"]["classifier"]["replica"] for rank in range(2)]
    evaluated = dict(load_agent(run, last).net.named_buffers())
    one, other = (part["buffers"] for part in saved)
    assert evaluated.keys() == one.keys() == other.keys()
    for key, x in evaluated.items():
        assert not torch.equal(one[key], other[key]), "each has the statistics of its own images"
        torch.testing.assert_close(x, (one[key] + other[key]) / 2)


@pytest.mark.parametrize(
    ("strategy_name", "parts", "shared"),
    [
        ("all-reduce", 1, True),
        ("local-sgd", 1, False),
        pytest.param("all-reduce", 2, True, marks=pytest.mark.slow),
    ],
)
def test_replicas_with_the_same_parameters_share_the_validation_images(
    strategy_name: str, parts: int, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = smallest("resnet20", tmp_path)
    learner = dataclasses.replace(cast(ImageClassifier, run.learner), validate_every=2)
    world = dataclasses.replace(cast(Any, run.world), validation=8)
    run = dataclasses.replace(
        run, world=world, learner=learner, strategy=strategy(strategy_name)(), replicas=2, launcher="inline",
        env_steps=None, updates=2, probe_every_updates=0, parts=(parts,),
    )  # fmt: skip
    seen: Counter[int] = Counter()
    logits = ClassifierLearner.logits

    def counted(self: ClassifierLearner, images: torch.Tensor) -> torch.Tensor:
        seen[self.rank] += len(images)
        return logits(self, images)

    monkeypatch.setattr(image_classifier, "EVALUATION_BATCH", 2)
    monkeypatch.setattr(ClassifierLearner, "logits", counted)
    assert train(run, tmp_path / "run").code == 0
    parts = [checkpoint.read_part(tmp_path / "run" / "checkpoints" / "last", rank) for rank in range(2)]
    one, other = (part["learner"]["validated"] for part in parts)
    if shared:
        assert one == other
        assert seen[1] == one["images"] // 2
    else:
        assert not other
        assert seen[1] == 0
    assert one["loss"] > 0
    assert seen[0] + seen[1] >= one["images"] > 2


class Recording:
    """A set of images that records which of them are selected."""

    def __init__(self, examples: ImageSet) -> None:
        self.examples = examples
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, examples: ArrayLike) -> ImageBatch:
        self.calls.append(list(np.asarray(examples)))
        return self.examples.select(examples)


def test_figures_are_of_all_examples_or_of_some_that_are_drawn_by_the_seed() -> None:
    it = learner()
    trained(it, 4)
    noise = images(30)
    data = Recording(ImageSet(noise.pixels, np.sort(noise.labels)))  # in the order of classes, as folders are
    logits = it.logits(noise.select(range(30)).images)
    labels = torch.from_numpy(data.examples.labels)
    right = logits.argmax(1) == labels
    assert it.figures(data)["accuracy"] == pytest.approx(right.float().mean().item())
    assert it.figures(data)["top5_accuracy"] == 1
    found = it.figures(data, 7, seed=3)
    drawn = data.calls[-1]
    assert found["accuracy"] == pytest.approx(right[drawn].float().mean().item())
    assert drawn == sorted(set(drawn))
    assert len(drawn) == found["images"] == 7
    assert len(set(labels[drawn].tolist())) > 1  # the first seven are of one class
    assert it.figures(data, 7, seed=3) == found
    it.figures(data, 7, seed=4)
    it.figures(data, 30)
    it.figures(data, 31)
    *whole, first, again, other, all_of_them, no_more = data.calls
    assert first == again != other
    assert whole == [all_of_them, no_more] == [list(range(30))] * 2


def test_drawn_examples_are_selected_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmurate.workloads.image_classifier.EVALUATION_BATCH", 8)
    data = Recording(images(40))
    learner().figures(data, 20)
    assert [len(call) for call in data.calls] == [8, 8, 4]
    drawn = np.concatenate(data.calls)
    assert (np.diff(drawn) > 0).all()


def test_the_rate_grows_with_the_images_of_an_update() -> None:
    config = ImageClassifier(batch=64, learning_rate=0.1, rate_batch=128)
    assert config.rate(1) == pytest.approx(0.05)
    assert config.rate(4) == pytest.approx(0.2)
    assert ImageClassifier(batch=64, learning_rate=0.1, rate_batch=0).rate(4) == 0.1


def test_schedules() -> None:
    step = ImageClassifier(schedule="step", milestones=(0.5, 0.75), warmup=0.1).rate_factor(100)
    assert [step(k) for k in (0, 4, 9, 49)] == pytest.approx([0.1, 0.5, 1, 1])
    assert [step(k) for k in (50, 74, 75, 200)] == pytest.approx([0.1, 0.1, 0.01, 0.01])
    cosine = ImageClassifier(schedule="cosine").rate_factor(100)
    assert [cosine(k) for k in (0, 50, 100, 150)] == pytest.approx([1, 0.5, 0, 0])
    assert ImageClassifier(warmup=0.5).rate_factor(None)(0) == 1


def test_the_validation_accuracy_is_measured_and_saved() -> None:
    config = ImageClassifier(width=4, batch=16, precision="float32", validate_every=3)
    it = learner(config, validation=images(12, seed=1))
    found = [it.learn(Batch(images().select(range(16)))).metrics for _ in range(4)]
    assert "accuracy" not in found[1]
    assert found[2]["accuracy"] == found[3]["accuracy"]
    assert found[2]["validation_loss"] > 0
    other = learner(config, validation=images(12, seed=1))
    other.load(it.state())
    assert other.state() == it.state()


def test_the_program_is_a_copy_that_gives_probabilities() -> None:
    it = learner()
    trained(it, 3)
    program = it.program()
    data = images(9).select(range(9)).images
    torch.testing.assert_close(program(data), it.logits(data).softmax(1), rtol=1e-4, atol=1e-5)
    assert it.net.training  # and trains on
    trained(it, 1)


@pytest.mark.parametrize("field", ["pixel_mean", "pixel_std"])
def test_another_number_of_channels_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} has 2 numbers"):
        learner(ImageClassifier(**{field: (0.5, 0.5)}))  # type: ignore[arg-type]


def test_examples_that_are_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[C, H, W\]"):
        ImageClassifier().build(Context(EnvSpec("rows", (3,), torch.float64, 0), Replica, 0))


def test_labels_and_images_stay_together_when_mixed() -> None:
    it = learner(ImageClassifier(width=4, mixup=1.0, precision="float32"))
    pixels = np.zeros((4, 8, 8, 3), np.uint8) + np.arange(4, dtype=np.uint8)[:, None, None, None] * 50
    batch = ImageBatch.of(pixels, np.arange(4))
    normalised = it._normalised(batch.images)
    mixed, other, share = it._mixed(normalised, batch.labels)
    assert other is not None
    for k in range(4):
        torch.testing.assert_close(mixed[k], share * normalised[k] + (1 - share) * normalised[other[k]])
