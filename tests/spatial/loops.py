"""Scripts that ``murmurate.run`` starts: functions at module level, as other processes import them."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch.nn import functional

from murmurate.spatial import parallelize
from spatial.nets import ResNet18
from waiting import until


def batches(steps: int, images: int, size: tuple[int, int] = (33, 36)) -> Any:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield (
            torch.randn(images, 3, *size, dtype=torch.float64, generator=generator),
            torch.randint(10, (images,), generator=generator),
        )


def resnet(width: int = 4) -> torch.nn.Module:
    torch.manual_seed(2)
    net = ResNet18(width).double()
    for module in net.modules():  # as batch statistics of half a batch are other ones
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    return net


def train(loop: Any, steps: int = 20, images: int = 4, die: tuple[int, int] | None = None) -> dict[str, Any]:
    """A small ResNet-18 under momentum; ``die``: (replica, part) is killed after three steps."""
    net = resnet()
    if loop.parts.size > 1:
        parallelize(net, loop.parts)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net)
    losses = []
    for step, (x, labels) in enumerate(loop.inputs(batches(steps, images))):
        if step == 3 and (loop.rank, loop.parts.rank) == die:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 5 and die is not None and loop.rank != die[0]:
            until(lambda: die[0] not in loop.fabric.living(), "the news that the other replica has ended")
    vector = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {
        "equal": all(torch.equal(vector, other) for other in loop.parts.gather(vector)),
        "losses": losses,
        "agreed": loop.agreed(),
        "state": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "heard": optimizer.last.heard,
        "main": loop.is_main,
    }


def one_part_dies(loop: Any) -> dict[str, Any]:
    return train(loop, steps=12, die=(1, 1))


def leader_dies(loop: Any) -> dict[str, Any]:
    return train(loop, steps=12, die=(0, 0))


def short(loop: Any) -> dict[str, Any]:
    return train(loop, steps=6)
