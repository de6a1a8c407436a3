"""Our all-reduce beside torch's DistributedDataParallel: same net, same frames, same two processes."""

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
from murmurate.bench._result import Log, median, spread
from murmurate.fabric.interface import Fabric
from murmurate.nets.actor_critic import actor_critic
from murmurate.replicator.replicator import Replicator
from murmurate.spec import EnvSpec
from murmurate.strategies.all_reduce import AllReduce

NAME = "all-reduce-vs-ddp"
SUMMARY = "updates per second of our all-reduce against torch's DistributedDataParallel over gloo"

_CLIP = 0.5


@dataclasses.dataclass(frozen=True)
class Plan:
    """``rounds`` pairs of blocks of ``updates`` each."""

    rounds: int = 40
    updates: int = 20
    batch: int = 80
    members: int = 2


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """Both sides live in the same processes and take turns; only the slowest member's wall time counts."""
    plan = plan or (Plan(rounds=150) if full else Plan())
    log(f"{plan.rounds} rounds of {plan.updates} updates each")
    with tempfile.TemporaryDirectory(prefix="murmurate-bench-") as folder:
        store = os.path.join(folder, "rendezvous")
        answers = _roles.together(plan.members, work, store, dataclasses.asdict(plan))
    return figures(answers, plan) | {"plan": dataclasses.asdict(plan)}


def work(fabric: Fabric, store: str, plan: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """One member: (wall, CPU) seconds of each block, by side."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=fabric.rank, world_size=plan["members"]
    )
    generator = torch.Generator().manual_seed(fabric.rank)
    frames = torch.randint(0, 256, (plan["batch"], 4, 84, 84), dtype=torch.uint8, generator=generator)
    sides = {"ours": ours(fabric, net(), frames), "ddp": ddp(net(), frames)}
    blocks: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for turn in range(-2, plan["rounds"]):
        for side in sides if turn % 2 else reversed(sides):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(plan["updates"]):
                sides[side]()
            if turn >= 0:
                blocks[side].append((time.perf_counter() - wall, time.process_time() - cpu))
    dist.barrier()
    return dict(blocks)


def net() -> nn.Module:
    """The Nature-2013 net of the recipe, the same numbers on every member."""
    spec = EnvSpec("pong", (4, 84, 84), torch.uint8, 6)
    return actor_critic(spec, generator=torch.Generator().manual_seed(0))


def loss_of(policy: Tensor, value: Tensor) -> Tensor:
    """Something smooth that every parameter has a part in."""
    return policy.logsumexp(-1).mean() + value.square().mean()


def ours(fabric: Fabric, module: nn.Module, frames: Tensor) -> Callable[[], Any]:
    """One update of ``module``, as an agent makes it."""
    replica = Replicator(AllReduce(), fabric).replicate("net", module, _rmsprop, clip=_CLIP)
    return lambda: replica.descend(loss_of(*module(frames)))


def ddp(module: nn.Module, frames: Tensor) -> Callable[[], Any]:
    """One update of ``module`` as DDP's documentation has it, with its faster setting for buckets."""
    together = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = _rmsprop(list(module.parameters()))

    def update() -> None:
        optimizer.zero_grad()
        loss_of(*together(frames)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
        optimizer.step()

    return update


def _rmsprop(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=7e-4, alpha=0.99, eps=1e-5)


def figures(answers: list[dict[str, list[tuple[float, float]]]], plan: Plan) -> dict[str, Any]:
    """Updates a second (the slowest member's) and CPU seconds an update (the members' mean)."""
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for side in ("ours", "ddp"):
        rounds = list(zip(*(answer[side] for answer in answers), strict=True))
        wall[side] = [plan.updates / max(w for w, _ in members) for members in rounds]
        cpu[side] = [sum(c for _, c in members) / len(members) / plan.updates for members in rounds]
    faster = [a / b for a, b in zip(wall["ours"], wall["ddp"], strict=True)]
    cheaper = [b / a for a, b in zip(cpu["ours"], cpu["ddp"], strict=True)]
    return {
        "net": f"Nature-2013, batch {plan.batch}, {plan.members} processes, RMSprop, clip {_CLIP}",
        "ratio_updates_per_second": median(faster),
        "ratio_updates_per_cpu_second": median(cheaper),
        "ours": {"updates_per_second": spread(wall["ours"]), "cpu_seconds_per_update": spread(cpu["ours"])},
        "ddp": {"updates_per_second": spread(wall["ddp"]), "cpu_seconds_per_update": spread(cpu["ddp"])},
        "ratios": {"updates_per_second": spread(faster), "updates_per_cpu_second": spread(cheaper)},
    }
