"""Our all-reduce against torch's DistributedDataParallel: same net, same frames, same two processes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from murmurate.bench import _roles
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.bench._roles import rmsprop
from murmurate.fabric.interface import Fabric
from murmurate.nets.actor_critic import actor_critic
from murmurate.ranges import PositiveInt
from murmurate.replicator.replicator import Replicator
from murmurate.spec import EnvSpec
from murmurate.strategies.all_reduce import AllReduce

NAME = "all-reduce-vs-ddp"
SUMMARY = "updates per second of our all-reduce against torch's DistributedDataParallel over gloo"

_CLIP = 0.5
Blocks = dict[str, list[tuple[float, float]]]  # side -> (wall, CPU) seconds of each block


@dataclasses.dataclass(frozen=True)
class DDPPlan:
    """In each round, a block of ``updates`` with our all-reduce and one with DDP.

    rounds: number of rounds. updates: number of updates in a block. batch: number of images in a member's
    update. members: number of processes.
    """

    rounds: PositiveInt = 40
    updates: PositiveInt = 20
    batch: PositiveInt = 80
    members: PositiveInt = 2


QUICK, FULL = DDPPlan(), DDPPlan(rounds=150)


def measure(plan: DDPPlan, log: Log) -> dict[str, Any]:
    """Both sides live in the same processes and take turns; the slowest member's wall time counts."""
    log(f"{plan.rounds} rounds of {plan.updates} updates each")
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
        answers = _roles.run_together(plan.members, work, os.path.join(folder, "rendezvous"), plan)
    return figures(answers, plan)


def work(fabric: Fabric, store: str, plan: DDPPlan) -> Blocks:
    """What one member measures."""
    _roles.join_gloo(fabric, store, plan.members)
    generator = torch.Generator().manual_seed(fabric.rank)
    frames = torch.randint(0, 256, (plan.batch, 4, 84, 84), dtype=torch.uint8, generator=generator)
    sides = {"ours": ours(fabric, net(), frames), "ddp": ddp(net(), frames)}
    blocks: Blocks = defaultdict(list)
    for turn in range(-2, plan.rounds):  # negative turns warm up
        for side in sides if turn % 2 else reversed(sides):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(plan.updates):
                sides[side]()
            if turn >= 0:
                blocks[side].append((time.perf_counter() - wall, time.process_time() - cpu))
    dist.barrier()
    return dict(blocks)


def net() -> nn.Module:
    """The Nature-2013 net of the recipe, with the same parameters on every member."""
    spec = EnvSpec("pong", (4, 84, 84), torch.uint8, 6)
    return actor_critic(spec, generator=torch.Generator().manual_seed(0))


def loss_of(policy: Tensor, value: Tensor) -> Tensor:
    """A smooth loss with a gradient for every parameter."""
    return policy.logsumexp(-1).mean() + value.square().mean()


def ours(fabric: Fabric, module: nn.Module, frames: Tensor) -> Callable[[], Any]:
    """A function that updates ``module`` as an agent does."""
    replica = Replicator(AllReduce(), fabric).replicate("net", module, rmsprop, clip=_CLIP)
    return lambda: replica.descend(loss_of(*module(frames)))


def ddp(module: nn.Module, frames: Tensor) -> Callable[[], Any]:
    """A function that updates ``module`` as in DDP's documentation, with its faster setting for buckets."""
    parallel = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = rmsprop(list(module.parameters()))

    def update() -> None:
        optimizer.zero_grad()
        loss_of(*parallel(frames)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
        optimizer.step()

    return update


def figures(answers: list[Blocks], plan: DDPPlan) -> dict[str, Any]:
    """Updates per second (of the slowest member) and CPU seconds per update (the mean over members)."""
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for side in ("ours", "ddp"):
        rounds = list(zip(*(answer[side] for answer in answers), strict=True))
        wall[side] = [plan.updates / max(w for w, _ in members) for members in rounds]
        cpu[side] = [sum(c for _, c in members) / len(members) / plan.updates for members in rounds]
    faster, cheaper = ratios(wall["ours"], wall["ddp"]), ratios(cpu["ddp"], cpu["ours"])
    return {
        "net": f"Nature-2013, batch {plan.batch}, {plan.members} processes, RMSprop, clip {_CLIP}",
        "ratio_updates_per_second": median(faster),
        "ratio_updates_per_cpu_second": median(cheaper),
        **{
            side: {"updates_per_second": spread(wall[side]), "cpu_seconds_per_update": spread(cpu[side])}
            for side in ("ours", "ddp")
        },
        "ratios": {"updates_per_second": spread(faster), "updates_per_cpu_second": spread(cheaper)},
    }
