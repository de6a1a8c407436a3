"""A process that decodes and augments images for a learner. It does not import torch: that takes longer than
decoding a thousand images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from murmurate.datasets._image_decoding import Place, checked_header, decode_crop, read_encoded
from murmurate.datasets._image_headers import ImageError
from murmurate.datasets.image_augmentation import DRAWS, Augmentation
from murmurate.datasets.image_draws import image_draws
from murmurate.sources.image_memory import BatchMemory, MemoryLayout
from murmurate.sources.polling import Backoff, settings_of_learner


@dataclass(frozen=True)
class WorkerSettings:
    """memory: file descriptor of the shared memory. worker: number of this process. shortest: of
    ``centre_crop``. key: key of the random numbers (``image_draws``)."""

    memory: int
    layout: MemoryLayout
    worker: int
    augment: Augmentation
    shortest: int
    key: int


def decode_augmented(
    place: Place,
    augment: Augmentation,
    shortest: int,
    draws: NDArray[np.float64],
    into: NDArray[np.uint8],
) -> None:
    """Write an image to ``into`` [H, W, 3], augmented by its random numbers ``draws``. Raises ImageError."""
    data = read_encoded(place)
    header = checked_header(data)
    crop = augment.crop_of(header.height, header.width, (into.shape[0], into.shape[1]), shortest, draws)
    decode_crop(data, header, crop, into, mirror=bool(augment.mirrors(draws)))
    if augment.has_finish:
        into[...] = augment.finish(into[None], draws[None])[0]


def decode_part(memory: BatchMemory, slot: int, settings: WorkerSettings) -> None:
    """Decode this process's part of the images in a slot; one that cannot be decoded gets its cause in
    ``memory.results``."""
    part = slice(settings.worker, None, settings.layout.workers)
    passes, numbers = memory.keys(slot, part)
    draws = image_draws(settings.key, passes, numbers, DRAWS)
    results = memory.results[slot]
    for row, position in enumerate(range(settings.worker, settings.layout.batch, settings.layout.workers)):
        if results["left_out"][position]:
            continue
        memory.begin(settings.worker, position)
        place = Place(*memory.task(slot, position))
        try:
            decode_augmented(
                place, settings.augment, settings.shortest, draws[row], memory.pixels[slot, position]
            )
        except ImageError as error:
            cause, detail = error.args
            results["detail"][position] = detail.encode("utf-8", "backslashreplace")[:200]
            results["cause"][position] = cause.encode()
        else:
            results["cause"][position] = b""  # what a process that has died since may have found


def main() -> None:
    settings: WorkerSettings = settings_of_learner()
    memory = BatchMemory(settings.memory, settings.layout)
    backoff = Backoff()
    while True:
        if not memory.has_work(settings.worker):
            backoff.sleep()
            continue
        backoff.reset()
        decode_part(memory, memory.done(settings.worker) % settings.layout.slots, settings)
        memory.finish(settings.worker)


if __name__ == "__main__":
    main()
