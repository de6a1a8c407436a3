"""Mini-batches of images, with random augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from murmurate.datasets.image_augmentation import Augmentation
from murmurate.datasets.image_draws import ImageDraws
from murmurate.datasets.image_set import ImageBatch
from murmurate.datasets.interface import DataSet, ExampleSet
from murmurate.errors import Refusal
from murmurate.sources.examples import ExampleOrder, batches_of, check_examples
from murmurate.sources.interface import RunView, SourceConfig, SourceContext
from murmurate.spec import Batch


@dataclass(frozen=True)
class ImageSourceConfig(SourceConfig):
    """Passes through the training images of a data set. augment: how they are changed at random."""

    augment: Augmentation = field(default_factory=Augmentation)

    gives: ClassVar[str] = "examples"

    def check(self, run: RunView) -> None:
        check_examples(run)
        if run.world.unit != "images":
            raise Refusal(f"the world {run.world.name} is of {run.world.unit}, and this source is of images.")

    def batches(self, run: RunView) -> int | None:
        return batches_of(run)

    def memory_bytes(self, run: RunView) -> int:
        """The images in memory, and a few copies of a mini-batch."""
        train, _, test = cast(DataSet, run.world).divided()
        batch, shape = run.learner.requires.batch, run.world.spec().observation_shape
        padding = 2 * self.augment.padding
        wide = shape[0] * (shape[1] + padding) * (shape[2] + padding)
        return int(train.all_examples.nbytes + test.nbytes + 4 * batch * wide)

    def open(self, context: SourceContext) -> ImageSource:
        run = context.run
        train = cast(DataSet, run.world).divided().train
        order = ExampleOrder(len(train), seed=run.seed, rank=context.rank, replicas=run.replicas)
        return ImageSource(train, order, run.learner.requires.batch, self.augment, run.seed)


class ImageSource:
    """Mini-batches without end (a ``Source``) of a set in memory. Images are changed by the process that
    learns from them."""

    exact = True

    def __init__(
        self,
        images: ExampleSet[ImageBatch],
        order: ExampleOrder,
        batch: int,
        augment: Augmentation,
        seed: int,
    ) -> None:
        self.alive: Callable[[int], bool] = lambda played: False
        self._images, self._order, self._batch = images, order, batch
        self._augment, self._seed = augment, seed

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        numbers, passes = self._order.take(self._batch)
        images = self._images.select(numbers)
        pixels = self._augment.apply(images.pixels, ImageDraws(self._seed, passes, numbers))
        return Batch(ImageBatch.of(pixels, images.labels.numpy()), env_steps=self._batch)

    def fields(self) -> dict[str, Any]:
        return {"passes": self._order.passes}

    def events(self) -> Sequence[tuple[str, str]]:
        return ()

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)

    def fresh_start(self, batches: int) -> None:
        """Go on where this replica would be after ``batches`` batches; a peer's state covers other images."""
        self._order.skip_to(batches * self._batch)

    def close(self) -> None:
        pass
