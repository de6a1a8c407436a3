"""The loaders of images that ``image_loading`` compares: ours, and torch's DataLoader with two data sets."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from murmurate.datasets._image_decoding import opencv
from murmurate.datasets.image_augmentation import DRAWS, Augmentation
from murmurate.datasets.image_files import ImageFiles
from murmurate.datasets.image_folder import FolderWorld
from murmurate.sources.encoded_images import EncodedImageSource
from murmurate.sources.examples import ExampleOrder
from murmurate.sources.image_memory import MemoryLayout
from murmurate.sources.image_worker import WorkerSettings, decode_augmented

AUGMENT = Augmentation(crop="resized", flip=True)


def make_folder(folder: Path, count: int, height: int, width: int, quality: int, classes: int) -> int:
    """Write ``count`` JPEG files of smooth noise below ``folder / "train"``, always the same; returns their
    total size in bytes."""
    cv2, written = opencv(), 0
    for number in range(count):
        random = np.random.default_rng([number, height, width])
        path = folder / "train" / f"{number % classes:03}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = _smooth_noise(random, height, width)
        data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
        path.write_bytes(data)
        written += len(data)
    return written


def _smooth_noise(random: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """[height, width, 3]: noise at several scales, with less of the finer ones, as in photographs."""
    cv2 = opencv()
    image = np.full((height, width, 3), 128, np.float32)
    for cells, strength in ((6, 55), (20, 35), (60, 20), (180, 9)):
        shape = (max(2, cells * height // width), cells, 3)
        coarse = random.normal(0, strength, shape).astype(np.float32)
        image += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    image += random.normal(0, 3, image.shape).astype(np.float32)
    return np.rint(image).clip(0, 255).astype(np.uint8)


class OurLoader:
    """``EncodedImageSource`` with the settings that a run gives it. ``next`` returns a mini-batch: images
    [G, 3, H, W] uint8 and labels [G]; ``processes`` returns the processes that decode."""

    def __init__(self, folder: Path, size: int, batch: int, workers: int, prefetch: int) -> None:
        train = files_of(folder, size)
        layout = MemoryLayout(1 + prefetch, batch, (size, size, 3), workers)
        settings = WorkerSettings(0, layout, 0, AUGMENT, train.shortest, key=0)
        order = ExampleOrder(len(train), seed=0, rank=0, replicas=1)
        self._source = EncodedImageSource(train, np.arange(len(train)), order, settings, rank=0)

    def next(self) -> tuple[Tensor, Tensor]:
        data = next(self._source).data
        return data.images, data.labels

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in self._source.pids]

    def close(self) -> None:
        self._source.close()


class TorchLoader:
    """As ``OurLoader``, by torch's DataLoader with at least as many batches ahead. Its order has no end, as
    ours has none: at the end of a pass it would wait for the first batch of the next one. Its processes keep
    the memory of decoded images, as ours do."""

    def __init__(self, data: _Files, batch: int, workers: int, prefetch: int) -> None:
        self._loader = DataLoader(
            data,
            batch,
            sampler=EndlessOrder(len(data)),
            num_workers=workers,
            prefetch_factor=max(1, math.ceil(prefetch / workers)),
            worker_init_fn=_prepare,
        )
        self._batches: Any = None  # its processes start at the first ``next``

    def next(self) -> tuple[Tensor, Tensor]:
        if self._batches is None:
            self._batches = iter(self._loader)
        images, labels = next(self._batches)
        return images.permute(0, 3, 1, 2), labels

    def processes(self) -> list[psutil.Process]:
        return [] if self._batches is None else [psutil.Process(w.pid) for w in self._batches._workers]

    def close(self) -> None:
        for process in self.processes():  # a stopped process would not shut down
            process.resume()
        if self._batches is not None:
            self._batches._shutdown_workers()


def _prepare(worker: int) -> None:
    # imported late: in Accelerate's environment there is not all that it imports
    from murmurate.launch.role import prepare_process

    prepare_process(1)


class EndlessOrder:
    """The numbers of ``count`` images, pass after pass, in a new order in each."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield from torch.randperm(self._count, generator=generator).tolist()


Loader = OurLoader | TorchLoader


def files_of(folder: Path, size: int) -> ImageFiles:
    """The training images below ``folder``."""
    world = FolderWorld(str(folder), size=size, shortest=size * 8 // 7, validation=0, test=0)
    files: ImageFiles = world.load().train
    return files


class _Files(Dataset[tuple[Tensor, int]]):
    """The training images below ``folder``: [H, W, 3] uint8, the order in which both decoders have them, and
    in which nets on a CPU are fastest, so that no pixel is moved to another one and back."""

    def __init__(self, folder: Path, size: int) -> None:
        self._files, self._size = files_of(folder, size), size

    def __len__(self) -> int:
        return len(self._files)


def _draws() -> NDArray[np.float64]:
    """An image's random numbers. ``image_draws``, which our processes call for a batch at a time, would take
    longer for a single image than drawing costs a DataLoader's user."""
    return torch.rand(DRAWS, dtype=torch.float64).numpy()


class SameFunctions(_Files):
    """Decodes and augments an image by the functions that our processes call."""

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        image = np.empty((self._size, self._size, 3), np.uint8)
        decode_augmented(self._files.encoded.place(number), AUGMENT, self._files.shortest, _draws(), image)
        return torch.from_numpy(image), int(self._files.labels[number])


class WithPillow(_Files):
    """The same augmentation as in torchvision's reference training: Pillow decodes the whole image, crops and
    scales it, and mirrors it. Without torchvision, since its CPU wheel does not fit every torch."""

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        from PIL import Image

        with open(self._files.encoded.place(number).path, "rb") as file:
            image = Image.open(io.BytesIO(file.read())).convert("RGB")
        draws = _draws()
        crop = AUGMENT.crop_of(image.height, image.width, (self._size, self._size), 0, draws)
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box)
        if draws[24] < 0.5:  # the draw for mirroring, as in ``Augmentation.mirrors``
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)), int(self._files.labels[number])


def cpu_seconds(loader: Loader) -> float:
    """CPU seconds so far of this process and of the processes that decode for ``loader``."""
    times = [process.cpu_times() for process in (psutil.Process(), *loader.processes())]
    return sum(each.user + each.system for each in times)
