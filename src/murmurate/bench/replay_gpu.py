"""Replay on a GPU: the kernels in Triton against the same operations in torch on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from murmurate.bench._result import Log, median, ratios, spread
from murmurate.errors import Refusal
from murmurate.losses.q_learning import q_loss, q_target, td_error
from murmurate.native import gpu
from murmurate.ranges import PositiveInt
from murmurate.replay.sum_tree import sum_tree
from murmurate.replay.tree import SumTree

NAME = "replay-gpu"
SUMMARY = "sum tree, frames and Q-learning's loss on a GPU: Triton against torch, and whether draws are equal"

_IMAGE, _WINDOW = (84, 84), 5  # Atari's: stacks of four frames and the next one
_ACTIONS = 18
_ALPHA, _BETA, _EPSILON = 0.6, 0.4, 1e-6


@dataclass(frozen=True)
class ReplayGPUPlan:
    """capacities: capacities of the sum tree. batches: batch sizes, each measured with every capacity.
    rounds: number of rounds, in each of which the calls of all sides are timed in turn. frames: number of
    frames in the ring from which windows are read. draws: number of draws that are compared with the draws of
    a tree on the host.

    calls: number of calls that are timed in a round.
    """

    capacities: tuple[PositiveInt, ...] = (1 << 20,)
    batches: tuple[PositiveInt, ...] = (256, 4096)
    rounds: PositiveInt = 5
    calls: PositiveInt = 200
    frames: PositiveInt = 1 << 17
    draws: PositiveInt = 1_000_000


QUICK = ReplayGPUPlan()
FULL = ReplayGPUPlan(capacities=(1 << 17, 1 << 20, 1 << 23), batches=(32, 256, 4096, 16_384), rounds=10)

Call = Callable[[], object]


def measure(plan: ReplayGPUPlan, log: Log) -> dict[str, Any]:
    """Microseconds of a call, with the host's waiting for the device, and the ratios of the other sides' to
    Triton's: the twin in torch, and for draws and updates torch's sums over all priorities. Raises Refusal
    without a GPU on which Triton's kernels run."""
    if not torch.cuda.is_available():
        raise Refusal(
            "bench replay-gpu measures a CUDA device, and torch sees none here. To measure on a CPU: "
            "murmurate bench replay"
        )
    device = torch.device("cuda", 0)
    if reason := gpu.why_not(device):
        raise Refusal(f"bench replay-gpu measures Triton's kernels, but {reason}")
    return {"device": torch.cuda.get_device_name(device), **figures(plan, log, device)}


def figures(plan: ReplayGPUPlan, log: Log, device: torch.device) -> dict[str, Any]:
    """``measure`` on a device on which Triton's kernels run."""
    cases = []
    for batch in plan.batches:
        for capacity in plan.capacities:
            calls = {name: tree_calls(name, capacity, batch, device) for name in ("triton", "torch")}
            calls["sums"] = sums_calls(capacity, batch, device)
            for task in calls["triton"]:
                label = f"{task} n={capacity:,} b={batch:,}"
                cases.append(
                    race(label, {name: by_task[task] for name, by_task in calls.items()}, plan, log, device)
                )
        cases.append(race(f"frames b={batch:,}", frame_calls(plan.frames, batch, device), plan, log, device))
        cases.append(race(f"q_step b={batch:,}", q_calls(batch, device), plan, log, device))
    return {"equal_draws": equal_draws(plan, device), "cases": cases}


def race(
    label: str, calls: dict[str, Call], plan: ReplayGPUPlan, log: Log, device: torch.device
) -> dict[str, Any]:
    """Microseconds of each of ``calls``, after one round that is not counted: it compiles the kernels."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(plan.rounds + 1):
        for name, call in calls.items():
            finish(device)
            start = time.perf_counter()
            for _ in range(plan.calls):
                call()
            finish(device)
            if turn:
                times[name].append(1e6 * (time.perf_counter() - start) / plan.calls)
    log(
        f"{label}, microseconds: "
        + ", ".join(f"{name} {median(taken):,.1f}" for name, taken in times.items())
    )
    return {
        "label": label,
        "microseconds": {name: spread(taken) for name, taken in times.items()},
        **{
            f"ratio_{name}": spread(ratios(taken, times["triton"]))
            for name, taken in times.items()
            if name != "triton"
        },
    }


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def full_tree(backend: Any, capacity: int, device: torch.device | str) -> SumTree:
    tree = sum_tree(capacity, backend=backend, device=device)
    tree.set(torch.arange(capacity), priorities(capacity))
    return tree


def priorities(capacity: int) -> Tensor:
    return torch.rand(capacity, generator=torch.Generator().manual_seed(0)) + 1e-3


def changes(capacity: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices and errors of an update."""
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(capacity, (batch,), generator=generator).to(device)
    return index, torch.randn(batch, generator=generator).to(device)


def tree_calls(backend: str, capacity: int, batch: int, device: torch.device) -> dict[str, Call]:
    tree = full_tree(backend, capacity, device)
    index, error = changes(capacity, batch, device)
    return {
        "sample": lambda: tree.sample(batch, _BETA),
        "update": lambda: tree.update(index, error, _ALPHA, _EPSILON),
    }


def sums_calls(capacity: int, batch: int, device: torch.device) -> dict[str, Call]:
    """The same without a tree, as a user of torch writes it: each draw adds up all priorities. Nothing is
    checked, and of equal indices any one counts."""
    leaves = priorities(capacity).to(device)
    index, error = changes(capacity, batch, device)

    def sample() -> tuple[Tensor, Tensor]:
        sums = leaves.cumsum(0, dtype=torch.float64)
        mass = torch.rand(batch, dtype=torch.float64, device=device) * sums[-1]
        drawn = torch.searchsorted(sums, mass, right=True)
        return drawn, (leaves[drawn] / leaves.min()) ** -_BETA

    def update() -> None:
        leaves[index] = (error.abs() + _EPSILON) ** _ALPHA

    return {"sample": sample, "update": update}


def frame_calls(frames: int, batch: int, device: torch.device) -> dict[str, Call]:
    from murmurate.replay import _triton_frames

    ring = torch.zeros(frames, *_IMAGE, dtype=torch.uint8, device=device)
    out = torch.empty(batch, _WINDOW, *_IMAGE, dtype=torch.uint8, device=device)
    first = torch.randint(frames - _WINDOW, (batch,), generator=torch.Generator().manual_seed(2)).to(device)
    step = torch.arange(_WINDOW, device=device)

    def with_torch() -> None:
        torch.index_select(ring, 0, (first[:, None] + step).view(-1), out=out.view(-1, *_IMAGE))

    return {"triton": lambda: _triton_frames.gather(ring, first, out), "torch": with_torch}


def q_calls(batch: int, device: torch.device) -> dict[str, Call]:
    """The loss and its gradient with respect to Q(s, .)."""
    from murmurate.losses._triton_q import FusedStep

    generator = torch.Generator().manual_seed(3)
    values, after, chooser = torch.randn(3, batch, _ACTIONS, generator=generator).to(device)
    action = torch.randint(_ACTIONS, (batch,), generator=generator).to(device)
    reward, discount, weight = torch.rand(3, batch, generator=generator).to(device)
    values.requires_grad_()

    def with_triton() -> None:
        loss, _ = FusedStep.apply(values, action, reward, discount, weight, after, chooser)  # type: ignore[no-untyped-call]
        torch.autograd.grad(loss, values)

    def with_torch() -> None:
        error = td_error(values, action, q_target(reward, discount, after, chooser))
        torch.autograd.grad(q_loss(error, weight), values)

    return {"triton": with_triton, "torch": with_torch}


def equal_draws(plan: ReplayGPUPlan, device: torch.device) -> float:
    """The share of draws that equal those of the torch tree on the host, at the last of ``capacities``."""
    capacity = plan.capacities[-1]
    expected = full_tree("torch", capacity, "cpu").sample(plan.draws, _BETA).indices
    drawn = full_tree("triton", capacity, device).sample(plan.draws, _BETA).indices
    return float((drawn.cpu() == expected).double().mean())
