"""Scripts that ``murmurate.run`` starts: functions at module level, as other processes import them."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import torch
from torch.nn import functional

from murmurate.bench._spatial_nets import ResNet18
from murmurate.nets.batch_norm import BatchNorm
from murmurate.spatial import parallelize
from waiting import until


def batches(steps: int, images: int, size: tuple[int, int] = (33, 36)) -> Any:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield (
            torch.randn(images, 3, *size, dtype=torch.float64, generator=generator),
            torch.randint(10, (images,), generator=generator),
        )


def sum_and_die(sum_over_parts: Any, x: torch.Tensor) -> None:
    """Dies within a batch normalisation: after the sum over the parts, before that over the replicas."""
    sum_over_parts(x)
    os.kill(os.getpid(), signal.SIGKILL)


def train(loop: Any, steps: int = 20, images: int = 4, die: tuple[int, int] | None = None) -> dict[str, Any]:
    """A small ResNet-18 under momentum; ``die``: (replica, part) is killed in the fourth step. Replicas that
    wait for one another have batch statistics of all their images."""
    torch.manual_seed(2)
    over_replicas = loop.size > 1 and loop.strategy.common_rounds
    norm = functools.partial(BatchNorm, sum_over=loop.sum) if over_replicas else torch.nn.BatchNorm2d
    net = ResNet18(width=4, norm=norm).double()
    if loop.parts.size > 1:
        parallelize(net, loop.parts)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net)
    losses = []
    for step, (x, labels) in enumerate(loop.inputs(batches(steps, images))):
        if step == 3 and (loop.rank, loop.parts.rank) == die:
            loop.parts.sum = functools.partial(sum_and_die, loop.parts.sum)
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 5 and die is not None and loop.rank != die[0]:
            until(lambda: die[0] not in loop.fabric.living(), "the news that the other replica has ended")
    # with the running statistics
    vector = torch.cat([x.flatten() for x in net.state_dict().values() if x.is_floating_point()])
    return {
        "equal": all(torch.equal(vector, other) for other in loop.parts.gather(vector)),
        "losses": losses,
        "agreed": loop.agreed(),
        "state": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "heard": optimizer.last.heard,
        "updates": optimizer.replica.clock,
        "main": loop.is_main,
    }


def one_part_dies(loop: Any) -> dict[str, Any]:
    return train(loop, steps=12, die=(1, 1))


def leader_dies(loop: Any) -> dict[str, Any]:
    return train(loop, steps=12, die=(0, 0))


def short(loop: Any) -> dict[str, Any]:
    return train(loop, steps=6)
