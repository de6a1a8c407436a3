"""Images per CPU second of ResNet-18 on a folder of JPEG files, decoding included, against plain PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.bench import _commands, _peers, image_loading
from murmurate.bench._image_loaders import make_folder
from murmurate.bench._plain_images import MEMBERS
from murmurate.bench._racer import (
    Racer,
    ThroughputPlan,
    Windows,
    plain_windows,
    race,
    rates_by_cpu,
    rates_by_wall,
)
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.errors import Refusal
from murmurate.ranges import PositiveInt

NAME = "resnet-throughput"
SUMMARY = "images per CPU second of ResNet-18, decoding included, against DataLoader and DDP"

_PEER = "accelerate"


@dataclasses.dataclass(frozen=True)
class ResNetPlan(ThroughputPlan):
    """Each racer trains ResNet-18 with two processes, on ``batch`` crops of ``size`` x ``size`` pixels per
    step and process, from generated JPEG files.

    images: number of JPEG files. height, width: size of the JPEG files in pixels. quality: quality of the
    JPEG files. classes: number of classes of the images. size: side of a crop, in pixels. batch: number of
    crops in a step of a process.
    """

    images: PositiveInt = 400
    height: PositiveInt = 350
    width: PositiveInt = 400
    quality: PositiveInt = 90
    classes: PositiveInt = 10
    size: PositiveInt = 224
    batch: PositiveInt = 16


QUICK = ResNetPlan(window_cpu_seconds=30.0, warm_up_cpu_seconds=20.0)
FULL = dataclasses.replace(QUICK, images=2000, rounds=11, window_cpu_seconds=60.0)


def measure(plan: ResNetPlan, log: Log) -> dict[str, Any]:
    """Ratios of our images per CPU second. ``ratio_ddp``: to the faster of two plain loops, whose data sets
    decode with our functions and with Pillow. ``ratio_loader``: of loading alone, to a DataLoader with
    Pillow; ``loading`` has all figures of ``image-loading``. Takes ten minutes on two cores. Raises Refusal
    for too few images for a batch of each process."""
    if plan.images < (least := MEMBERS * plan.batch):
        raise Refusal(f"--images is {plan.images}, and a step takes {least} of them. Use --images {least}.")
    usual = image_loading.FULL if plan.rounds >= FULL.rounds else image_loading.QUICK
    same = {name: getattr(plan, name) for name in ("images", "height", "width", "quality", "classes", "size")}
    loading_plan = dataclasses.replace(usual, **same)
    loading = image_loading.measure(loading_plan, log)
    windows = race(functools.partial(racers, plan), plan, log)
    return {**figures(windows), "ratio_loader": loading["ratio_pillow"], "loading": loading}


def racers(plan: ResNetPlan, where: Path) -> dict[str, Racer]:
    images = where / "images"
    make_folder(images, plan.images, plan.height, plan.width, plan.quality, plan.classes)
    ours = _commands.murmurate_train(
        "ours", "folder-resnet18", where,
        "--world.path", str(images), "--world.validation", "0",
        "--world.size", str(plan.size), "--world.shortest", str(plan.size * 8 // 7),
        "--replicas", str(MEMBERS), "--agent.batch", str(plan.batch),
        "--augment.crop", "resized", "--augment.flip", "--augment.lighting", "0",
        "--workers", "1", "--record-every-seconds", "0.5",
    )  # fmt: skip
    racers_by_label = {"ours": ours}
    for data in ("same", "pillow"):
        racers_by_label[f"ddp {data}"] = plain([sys.executable], "ddp", data, plan, where)
    if _peers.absent(_PEER) is None:
        python, _ = _peers.command(_PEER)
        with_this_package = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", python]
        racers_by_label[_PEER] = plain(with_this_package, _PEER, "same", plan, where)
    return racers_by_label


def plain(python: Sequence[str], engine: str, data: str, plan: ResNetPlan, where: Path) -> Racer:
    """The plain loop. python: the words that start the interpreter."""
    settings = (str(where / "images"), str(plan.size), str(plan.batch), str(plan.classes))
    command = [*python, "-m", "murmurate.bench._plain_images", engine, data, *settings]
    return _commands.appending(f"{engine}-{data}", command, where)


def figures(windows: Windows) -> dict[str, Any]:
    by_cpu = rates_by_cpu(windows)
    by_wall = rates_by_wall(windows)
    plain_loops = [label for label in windows if label.startswith("ddp")]
    fastest = max(plain_loops, key=lambda label: median(by_cpu[label]))
    against = {label: median(ratios(by_cpu["ours"], by_cpu[label])) for label in windows if label != "ours"}
    return {
        "images_per_cpu_second": median(by_cpu["ours"]),
        "ratio_ddp": against[fastest],
        "fastest_ddp": fastest,
        "ratio_accelerate": against.get(_PEER),
        "ratios": against,
        "ratios_wall": {label: median(ratios(by_wall["ours"], by_wall[label])) for label in against},
        "by_loop": {
            label: {
                "images_per_cpu_second": spread(by_cpu[label]),
                "images_per_second": spread(by_wall[label]),
            }
            for label in windows
        },
        "peers": [{"peer": _PEER, "status": _peers.absent(_PEER) or "ran"}],
        "windows": plain_windows(windows),
    }
