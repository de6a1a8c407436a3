"""Mini-batches of images, with random augmentation."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._image_decoding import opencv
from murmurate.datasets.image_augmentation import DRAWS, Augmentation
from murmurate.datasets.image_draws import image_draws
from murmurate.datasets.image_files import ImageFiles
from murmurate.datasets.image_set import ImageBatch
from murmurate.datasets.interface import DataSet, ExampleSet, Subset
from murmurate.errors import Refusal
from murmurate.native.cores import usable_cores
from murmurate.ranges import Range
from murmurate.sources.encoded_images import EncodedImageSource
from murmurate.sources.examples import ExampleOrder, ExampleSource, batches_of, check_examples
from murmurate.sources.image_memory import MemoryLayout
from murmurate.sources.image_worker import WorkerSettings
from murmurate.sources.interface import BatchShape, RunView, SourceConfig, SourceContext
from murmurate.spec import Batch, derive_seed

_MOST_WORKERS = 64
_WORKER_BYTES = 160 * 2**20  # Python, numpy and OpenCV, and buffers that are freed after each image


@dataclass(frozen=True)
class ImageSourceConfig(SourceConfig):
    """Passes through the training images of a data set. Images in files are decoded by processes.

    augment: how images are changed at random. workers: number of processes of each replica that decode
        images; none means the replica's share of its host's cores (under Ray all replicas count as on one
        host); with 0 the learner decodes. prefetch: number of mini-batches decoded ahead.
    """

    augment: Augmentation = field(default_factory=Augmentation)
    workers: Annotated[int, Range(0, _MOST_WORKERS)] | None = field(default=None, metadata={"place": True})
    prefetch: Annotated[int, Range(1, 1000)] = field(default=3, metadata={"place": True})

    gives: ClassVar[str] = "examples"

    def check(self, run: RunView) -> None:
        check_examples(run)
        if run.world.unit != "images":
            raise Refusal(f"the world {run.world.name} has {run.world.unit}, and this source needs images.")

    def batches(self, run: RunView) -> int | None:
        return batches_of(run)

    def batch_shape(self, run: RunView) -> BatchShape:
        batch: int = run.learner.requires.batch
        return BatchShape(batch, 1, 1.0, batch)

    def cost_settings(self) -> dict[str, Any]:
        return {"augment": self.augment}

    def memory_bytes(self, run: RunView) -> int:
        """Memory of the images, or of the index of images in files, of the mini-batches that are decoded
        ahead, and of the processes. Raises Refusal for an augmentation that these images cannot have."""
        spec = run.world.spec()
        shape = spec.observation_shape
        self.augment.check(shape)
        split = cast(DataSet, run.world).divided()
        # the parts of a split may share one set of images, which is in memory once
        image_sets = {id(x): x for x in (getattr(part, "all_examples", part) for part in split)}
        set_bytes = sum(image_set.nbytes for image_set in image_sets.values())
        images = split.train.all_examples
        _warn_of_unlearned(images.labels[split.train.indices], spec.actions)
        if images.encoded is None:
            padding = 2 * self.augment.padding
            padded_size = shape[0] * (shape[1] + padding) * (shape[2] + padding)
            return int(set_bytes + 4 * run.learner.requires.batch * padded_size)
        _warn_of_small_crops(images, self.augment)
        layout = self._layout(run, images)
        return int(set_bytes + layout.pixel_bytes + layout.workers * _WORKER_BYTES)

    def decoding_processes(self, run: RunView) -> int:
        """Number of processes of each replica that decode images; 0 if these are decoded already."""
        images = cast(DataSet, run.world).divided().train.all_examples
        return 0 if images.encoded is None else self._layout(run, images).workers

    def _layout(self, run: RunView, images: ImageFiles) -> MemoryLayout:
        channels, height, width = images.shape
        workers = self.workers
        if workers is None:
            # torchrun says how many processes share this host
            here = min(run.replicas, int(os.environ.get("LOCAL_WORLD_SIZE", run.replicas)))
            workers = max(1, min(usable_cores() // here, _MOST_WORKERS))
        slots = 1 + (self.prefetch if workers else 0)
        return MemoryLayout(slots, run.learner.requires.batch, (height, width, channels), workers)

    def open(self, context: SourceContext) -> ImageSource | EncodedImageSource:
        run = context.run
        train: Subset[ImageBatch] = cast(DataSet, run.world).divided().train
        order = ExampleOrder(len(train), seed=run.seed, rank=context.rank, replicas=run.replicas)
        key = derive_seed(run.seed, "augmentation")
        images: Any = train.all_examples
        if images.encoded is None:
            return ImageSource(train, order, run.learner.requires.batch, self.augment, key)
        opencv()  # if the package is missing, it raises here rather than in a process
        settings = WorkerSettings(0, self._layout(run, images), 0, self.augment, images.shortest, key)
        return EncodedImageSource(images, train.indices, order, settings, context.rank)


def _warn_of_unlearned(labels: NDArray[np.int64], classes: int) -> None:
    """Warn of classes without a training image: a draw of held-out images may take all of a class.
    labels: those of the training images. classes: number of classes of the data set."""
    unlearned = np.flatnonzero(np.bincount(labels, minlength=classes) == 0)  # faster than setdiff1d
    if len(unlearned):
        warnings.warn(
            f"{len(unlearned):,} of {classes:,} classes have no training image (the first is number "
            f"{unlearned[0]}, from 0, in their order), so they will not be recognised. Add images, or hold "
            "out fewer or others: --world.validation, --world.test, --world.split-seed.",
            stacklevel=2,
        )


def _warn_of_small_crops(images: ImageFiles, augment: Augmentation) -> None:
    """Warn if crops are less than a quarter of an image, as when only ``world.size`` was made smaller."""
    size, scaled, remedies = images.size, [], []
    if images.shortest > 2 * size:
        scaled.append(f"{images.shortest} pixels (world.shortest)")
        remedies.append(f"--world.shortest {size * 8 // 7}")
    if augment.crop == "multi-scale" and augment.shortest[0] > 2 * size:
        least, most = augment.shortest
        scaled.append(f"{least} to {most} pixels (augment.shortest)")
        remedies.append(f"--augment.shortest {size * 8 // 7} {size * 15 // 7}")  # as 256 and 480 for 224
    if scaled:
        warnings.warn(
            f"an image's shorter side is scaled to {' and '.join(scaled)}, and world.size {size} cuts a "
            "square from it that is less than a quarter of the image. Perhaps you want "
            f"{' '.join(remedies)}.",
            stacklevel=2,
        )


class ImageSource(ExampleSource):
    """Mini-batches without end (a ``Source``) of a set in memory; the learner's process augments the images.

    key: key of the random numbers (``image_draws``).
    """

    def __init__(
        self,
        images: ExampleSet[ImageBatch],
        order: ExampleOrder,
        batch: int,
        augment: Augmentation,
        key: int,
    ) -> None:
        super().__init__(images, batch, order)
        self._augment, self._key = augment, key

    def __next__(self) -> Batch:
        numbers, passes = self._order.take(self._batch)
        images = self._examples.select(numbers)
        pixels = self._augment.apply(images.pixels, image_draws(self._key, passes, numbers, DRAWS))
        return Batch(ImageBatch.of(pixels, images.labels.numpy()), env_steps=self._batch)
