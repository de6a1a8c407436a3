"""A plain loop that trains ResNet-18 on a folder of images, with torch's DataLoader and
DistributedDataParallel, or with Accelerate. ``resnet_throughput`` runs it as a command:

    python -m murmurate.bench._plain_images ENGINE DATA FOLDER SIZE BATCH CLASSES PROGRESS

It trains without end in two processes, and appends the number of images so far, as ``env_steps``, to the
file PROGRESS (see ``_racer``).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from murmurate.bench._image_loaders import SameFunctions, WithPillow
from murmurate.bench._racer import ProgressFile
from murmurate.nets.precision import faster_precision
from murmurate.nets.resnet import ResNet

MEMBERS = 2
DATA = {"same": SameFunctions, "pillow": WithPillow}
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PlainNorm(nn.BatchNorm2d):
    """torch's batch normalisation, addition and rectifier, as three operations."""

    def forward(self, x: Tensor, residual: Tensor | None = None, rectify: bool = False) -> Tensor:
        y = super().forward(x)
        if residual is not None:
            y = y + residual
        return torch.relu_(y) if rectify else y


def plain_net(size: int, classes: int) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    norm: Any = PlainNorm
    return ResNet("resnet18", (3, size, size), classes, norm=norm, generator=generator)


def sgd(
    net: nn.Module,
    lr: float = 0.1,
    weight_decay: float = 1e-4,
    momentum: float = 0.9,
    *,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """torch's SGD with Nesterov momentum. fused: whether an update is one pass over memory, as in the image
    classifier."""
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=True, fused=fused)


def train(rank: int, engine: str, data: str, folder: str, size: int, batch: int, classes: int, progress: str,
          store: str) -> None:  # fmt: skip
    """Train without end as process ``rank`` of ``MEMBERS``."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(MEMBERS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # Accelerate asks for them
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MEMBERS)
    examples = DATA[data](Path(folder), size)
    sampler: DistributedSampler[Any] = DistributedSampler(examples, MEMBERS, rank)
    loader: Any = DataLoader(
        examples, batch, sampler=sampler, num_workers=1, drop_last=True, persistent_workers=True,
        prefetch_factor=3,
    )  # fmt: skip
    net = plain_net(size, classes)
    optimizer = sgd(net)
    step = _accelerated(net, optimizer) if engine == "accelerate" else _ddp(net, optimizer)
    images_seen, epoch, file = 0, 0, ProgressFile(Path(progress))
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        for images, labels in loader:
            step(_normalised(images), labels)
            images_seen += MEMBERS * len(labels)
            if rank == 0:
                file.write(images_seen)


def _normalised(images: Tensor) -> Tensor:
    """images: [G, H, W, 3]. Returns [G, 3, H, W] in ``torch.channels_last``."""
    x = images.permute(0, 3, 1, 2).float().div_(255)
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _DEVIATION))
    return x.sub_(mean).div_(deviation)


def _ddp(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], None]:
    model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    bfloat16 = faster_precision(torch.device("cpu")) == "bfloat16"

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _accelerated(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], None]:
    from accelerate import Accelerator

    bfloat16 = faster_precision(torch.device("cpu")) == "bfloat16"
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if bfloat16 else "no")
    model, optimizer = accelerator.prepare(net, optimizer)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()

    return step


def main(engine: str, data: str, folder: str, size: str, batch: str, classes: str, progress: str) -> None:
    with tempfile.TemporaryDirectory(prefix="murmurate-plain-") as where:
        arguments = (engine, data, folder, int(size), int(batch), int(classes), progress, f"{where}/store")
        multiprocessing.spawn(train, arguments, nprocs=MEMBERS)  # type: ignore[no-untyped-call, attr-defined]


if __name__ == "__main__":
    main(*sys.argv[1:])
