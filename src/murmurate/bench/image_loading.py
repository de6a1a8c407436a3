"""Images per CPU second, decoded and augmented for training, against torch's DataLoader."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench._image_loaders import (
    Loader,
    OurLoader,
    SameFunctions,
    TorchLoader,
    WithPillow,
    cpu_seconds,
    make_folder,
)
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeInt, PositiveInt

NAME = "image-loading"
_TICK_SECONDS = 0.01  # resolution of the CPU times of other processes
SUMMARY = "JPEG files decoded and augmented per CPU second, against torch's DataLoader"


@dataclass(frozen=True)
class LoadingPlan:
    """images: number of JPEG files, which are generated. height, width: size of the JPEG files in pixels.
    quality: quality of the JPEG files. size: side of the crops in pixels. workers: number of processes that
    decode. rounds: number of rounds, in each of which every loader has a window.

    classes: number of classes of the images. batch: number of images in a batch. batches: number of batches
    in a window. prefetch: number of batches that are prepared in advance.
    """

    images: PositiveInt = 500
    height: PositiveInt = 350
    width: PositiveInt = 400
    quality: PositiveInt = 90
    classes: PositiveInt = 10
    size: PositiveInt = 224
    batch: PositiveInt = 64
    workers: PositiveInt = 2
    prefetch: NonNegativeInt = 4
    rounds: PositiveInt = 5
    batches: PositiveInt = 16


QUICK, FULL = LoadingPlan(), LoadingPlan(images=2000, rounds=11, batches=40)


def measure(plan: LoadingPlan, log: Log) -> dict[str, Any]:
    """Ratios of our images per CPU second. ``ratio_same_functions``: to a DataLoader whose data set calls our
    functions for an image, so that it compares how images pass between processes. ``ratio_pillow``: to a
    DataLoader whose data set uses Pillow, as torchvision's reference training does. ``_wall``: the same per
    second. Takes a minute on two cores. Raises Refusal for fewer images than a batch."""
    if plan.images < plan.batch:
        raise Refusal(
            f"{plan.images} images do not make a batch of {plan.batch}: use more, or a smaller batch."
        )
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as name:
        folder = Path(name)
        total_bytes = make_folder(folder, plan.images, plan.height, plan.width, plan.quality, plan.classes)
        log(
            f"{plan.images} JPEG files of {plan.height} x {plan.width}, "
            f"{total_bytes // plan.images:,} bytes each"
        )
        shared = (plan.batch, plan.workers, plan.prefetch)
        loaders: dict[str, Loader] = {
            "murmurate": OurLoader(folder, plan.size, *shared),
            "torch, same functions": TorchLoader(SameFunctions(folder, plan.size), *shared),
            "torch, Pillow": TorchLoader(WithPillow(folder, plan.size), *shared),
        }
        windows: dict[str, list[tuple[float, float]]] = {label: [] for label in loaders}
        try:
            for number in range(plan.rounds):
                order = list(loaders)[number % len(loaders) :] + list(loaders)[: number % len(loaders)]
                for label in order:
                    windows[label].append(_window(loaders[label], plan))
                rates = ", ".join(
                    f"{label} {its_windows[-1][0]:,.0f}" for label, its_windows in windows.items()
                )
                log(f"round {number + 1}: images per CPU second: {rates}")
        finally:
            for loader in loaders.values():
                loader.close()
    return {**_figures(windows), "bytes_per_image": total_bytes / plan.images}


def _window(loader: Loader, plan: LoadingPlan) -> tuple[float, float]:
    """(images per CPU second, images per second). The processes of a loader are stopped while other loaders
    run; the batches that they had decoded ahead are taken before the measurement."""
    for process in loader.processes():
        process.resume()
    for _ in range(plan.prefetch + plan.workers + 2):
        loader.next()
    cpu_before, began, images = cpu_seconds(loader), time.perf_counter(), 0
    for _ in range(plan.batches):
        data, labels = loader.next()
        images += len(labels)
        data.numpy().max()  # every pixel is read, as a learner does
    seconds = time.perf_counter() - began
    spent = max(cpu_seconds(loader) - cpu_before, _TICK_SECONDS)
    for process in loader.processes():
        process.suspend()
    return images / spent, images / seconds


def _figures(windows: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    by_cpu = {label: [window[0] for window in its_windows] for label, its_windows in windows.items()}
    by_wall = {label: [window[1] for window in its_windows] for label, its_windows in windows.items()}
    ours, same, pillow = by_cpu
    return {
        "images_per_cpu_second": median(by_cpu[ours]),
        "images_per_second": median(by_wall[ours]),
        "ratio_same_functions": median(ratios(by_cpu[ours], by_cpu[same])),
        "ratio_pillow": median(ratios(by_cpu[ours], by_cpu[pillow])),
        "ratio_same_functions_wall": median(ratios(by_wall[ours], by_wall[same])),
        "ratio_pillow_wall": median(ratios(by_wall[ours], by_wall[pillow])),
        "by_loader": {
            label: {
                "images_per_cpu_second": spread(by_cpu[label]),
                "images_per_second": spread(by_wall[label]),
            }
            for label in windows
        },
    }
