"""Images as a source: each once a pass, changed by draws that follow from (seed, pass, number) alone."""

from __future__ import annotations

import numpy as np

from laws.problems import same
from murmurate.datasets.image_augmentation import Augmentation
from murmurate.datasets.image_draws import image_draws
from murmurate.datasets.image_set import ImageSet
from murmurate.sources.examples import ExampleOrder
from murmurate.sources.images import ImageSource
from pictures import drawn


def source(count=10, batch=4, rank=0, replicas=1, seed=0, augment=None):
    """Image k has the label k."""
    images = ImageSet(drawn(count, 6, 5, 3), np.arange(count))
    order = ExampleOrder(count, seed=seed, rank=rank, replicas=replicas)
    return ImageSource(images, order, batch, augment or Augmentation(), seed)


def taken(it, batches):
    data = [next(it).data for _ in range(batches)]
    return [(x.images.clone(), x.labels.tolist()) for x in data]


def test_each_pass_gives_every_image_once_to_one_of_the_replicas():
    sources = [source(count=12, batch=2, rank=rank, replicas=3) for rank in range(3)]
    for _ in range(3):
        seen = [label for it in sources for _, labels in taken(it, 2) for label in labels]
        assert sorted(seen) == list(range(12))
    assert [it.fields()["passes"] for it in sources] == [3, 3, 3]


def test_without_augmentation_images_are_as_they_are():
    images = drawn(10, 6, 5, 3)
    for batch, labels in taken(source(), 3):
        np.testing.assert_array_equal(batch.permute(0, 2, 3, 1).numpy(), images[labels])


def test_a_resumed_source_gives_the_same_changed_images():
    augment = Augmentation(padding=2, flip=True)
    one, other = source(augment=augment), source(augment=augment)
    taken(one, 4)
    other.load(one.state())
    assert same(taken(one, 7), taken(other, 7))
    joiner = source(augment=augment)
    joiner.fresh_start(11)
    assert same(taken(one, 2), taken(joiner, 2))


def test_an_image_is_changed_alike_in_whichever_batch_and_differently_in_each_pass():
    augment = Augmentation(padding=3, flip=True)

    def by_label(batch, batches, seed=0):
        found = {}
        for images, labels in taken(source(batch=batch, seed=seed, augment=augment), batches):
            for image, label in zip(images, labels, strict=True):
                found.setdefault(label, []).append(image)
        return found

    small, large = by_label(4, 10), by_label(10, 4)
    assert same(small, large)
    assert sum(same(first, second) for first, second, *_ in small.values()) <= 1
    assert not same(small, by_label(4, 10, seed=1))


def test_draws_are_uniform_and_independent():
    count = 40_000
    numbers, zeros = np.arange(count), np.zeros(count, np.int64)
    draws = [*image_draws(3, zeros, numbers, 3).T, image_draws(3, zeros + 1, numbers, 1)[:, 0]]
    draws += [image_draws(4, zeros, numbers, 1)[:, 0], draws[0][1:]]
    for x in draws:
        counts, _ = np.histogram(x, bins=50, range=(0, 1))
        expected = len(x) / 50
        assert ((counts - expected) ** 2 / expected).sum() < 95  # chi squared, 49 degrees: p < 1e-4
    length = count - 1
    correlation = np.corrcoef([x[:length] for x in draws])
    assert np.abs(correlation - np.eye(len(draws))).max() < 5 / np.sqrt(length)
    alone = image_draws(3, zeros[:1], numbers[7:8], 3)
    assert alone.tolist() == [[x[7] for x in draws[:3]]]
