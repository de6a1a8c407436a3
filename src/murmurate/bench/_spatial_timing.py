"""Time and memory of a convolution, whole on one core and in parts on a core each, in the same rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from murmurate.bench import _roles
from murmurate.fabric.interface import Fabric
from murmurate.spatial import Parts, SpatialTensor, scatter


@dataclass(frozen=True)
class Case:
    """A convolution with ``channels`` in and out, stride 1 and "same" padding, on images of size x size."""

    size: int
    grid: tuple[int, int]
    dilation: int = 1
    kernel: int = 3
    channels: int = 64
    batch: int = 1

    @property
    def parts(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class Timing:
    """forward, backward, cpu: the slowest member's seconds in each round; ``cpu`` is the CPU time of both
    passes. activation_bytes: bytes that the largest part keeps for the backward pass, its output included."""

    forward: list[float]
    backward: list[float]
    cpu: list[float]
    activation_bytes: int

    @property
    def both(self) -> list[float]:
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


def timed(case: Case, rounds: int) -> tuple[Timing, Timing]:
    """The timings (whole on one core, in parts on a core each), which take turns in the same processes."""
    answers = _roles.together(case.parts, work, case, rounds)
    whole = next(answer["whole"] for answer in answers if "whole" in answer)
    shares = [answer["parts"] for answer in answers]

    def slowest(name: str) -> list[float]:
        return [max(times) for times in zip(*(getattr(s, name) for s in shares), strict=True)]

    largest = max(s.activation_bytes for s in shares)
    return whole, Timing(slowest("forward"), slowest("backward"), slowest("cpu"), largest)


def work(fabric: Fabric, case: Case, rounds: int) -> dict[str, Timing]:
    """What one member measures; the whole is computed by member 0 alone, while the others sleep."""
    parts = Parts.open(fabric, case.grid)
    generator = torch.Generator().manual_seed(0)
    shape = case.batch, case.channels, case.size, case.size
    image = torch.randn(shape, generator=generator)
    weight = torch.randn(case.channels, case.channels, case.kernel, case.kernel, generator=generator) * 0.04
    weight.requires_grad_()
    share = scatter(image, parts)
    share = share.like(share.local.contiguous())
    if fabric.rank:
        del image
    whole: list[tuple[float, ...]] = []
    own: list[tuple[float, ...]] = []
    for turn in range(-1, rounds):  # turn -1 is a warm-up, which is not kept
        if fabric.rank == 0:
            whole += [_times(_layer(image, weight, case))] * (turn >= 0)
        _barrier(parts)
        own += [_times(_layer(share, weight, case), lambda: _barrier(parts))] * (turn >= 0)
        _barrier(parts)
    result = {"parts": _timing(own, activation_bytes(_layer(share, weight, case), weight))}
    if fabric.rank == 0:
        result["whole"] = _timing(whole, activation_bytes(_layer(image, weight, case), weight))
    return result


def _timing(times: list[tuple[float, ...]], size: int) -> Timing:
    forward, backward, cpu = (list(column) for column in zip(*times, strict=True))
    return Timing(forward, backward, cpu, size)


def _barrier(parts: Parts) -> None:
    parts.sum(torch.zeros(1))


def _layer(x: Tensor, weight: Tensor, case: Case) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that computes (input, output) of this member."""
    padding = case.dilation * (case.kernel // 2)

    def forward() -> tuple[Tensor, Tensor]:
        if isinstance(x, SpatialTensor):
            image = x.local.detach().requires_grad_()
            y = functional.conv2d(x.like(image), weight, None, 1, padding, case.dilation)
            assert isinstance(y, SpatialTensor)
            return image, y.local
        image = x.detach().requires_grad_()
        return image, functional.conv2d(image, weight, None, 1, padding, case.dilation)

    return forward


def _times(
    forward: Callable[[], tuple[Tensor, Tensor]], barrier: Callable[[], None] = lambda: None
) -> tuple[float, float, float]:
    """Seconds of a forward and of a backward pass, before which members wait at ``barrier``, and CPU
    seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    _, y = forward()
    middle, cpu = time.perf_counter(), time.process_time() - cpu
    gradient = torch.ones_like(y)
    barrier()
    backward_start, cpu_before = time.perf_counter(), time.process_time()
    y.backward(gradient)  # type: ignore[no-untyped-call]
    return middle - start, time.perf_counter() - backward_start, cpu + time.process_time() - cpu_before


def activation_bytes(forward: Callable[[], tuple[Tensor, Tensor]], *parameters: Tensor) -> int:
    """Bytes of the output and of what is kept for the backward pass, without ``parameters``."""
    kept: dict[int, int] = {}
    known = {p.untyped_storage().data_ptr() for p in parameters}
    # these stay alive, so that no memory is reused and counted twice
    held: list[Any] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, y = forward()
    kept[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
    return sum(kept.values())
