"""Time and memory of a convolution or a net, whole on one core and in parts on a core each, in the same
rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from murmurate.bench import _roles
from murmurate.bench._spatial_nets import batch_for
from murmurate.fabric.interface import Fabric
from murmurate.spatial import Parts, SpatialTensor, parallelize, scatter

Forward = Callable[[], tuple[Tensor, Tensor]]  # (input, output) of this member


@dataclass(frozen=True)
class Case:
    """A convolution with ``channels`` in and out, stride 1 and "same" padding, on images of size x size.

    net: makes a net (see ``_spatial_nets``), whose loss is computed in place of the convolution.
    """

    size: int
    grid: tuple[int, int]
    dilation: int = 1
    kernel: int = 3
    channels: int = 64
    batch: int = 1
    net: Callable[[], nn.Module] | None = None

    @property
    def parts(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class Timing:
    """forward, backward, cpu: seconds in each round, of parts those of the slowest member; ``cpu`` is the CPU
    time of both passes. activation_bytes: bytes that are kept for the backward pass, the output included, of
    parts those of the largest."""

    forward: list[float]
    backward: list[float]
    cpu: list[float]
    activation_bytes: int

    @property
    def both(self) -> list[float]:
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


def timed(case: Case, rounds: int) -> tuple[Timing, Timing]:
    """The timings (whole on one core, in parts on a core each), which take turns in the same processes."""
    answers = _roles.run_together(case.parts, work, case, rounds)
    whole = next(answer["whole"] for answer in answers if "whole" in answer)
    members = [answer["parts"] for answer in answers]

    def slowest(name: str) -> list[float]:
        return [max(times) for times in zip(*(getattr(m, name) for m in members), strict=True)]

    largest = max(m.activation_bytes for m in members)
    return whole, Timing(slowest("forward"), slowest("backward"), slowest("cpu"), largest)


def work(fabric: Fabric, case: Case, rounds: int) -> dict[str, Timing]:
    """What one member measures: ``parts``, its own times; and ``whole`` at member 0, which alone computes the
    whole layer or net, while the others wait for it."""
    parts = Parts.open(fabric, case.grid)
    whole, part, parameters = _layers(case, parts) if case.net is None else _nets(case.net, case, parts)
    whole_times: list[tuple[float, ...]] = []
    part_times: list[tuple[float, ...]] = []
    for _ in range(1 + rounds):
        if fabric.rank == 0:
            whole_times.append(_times(whole))
        _barrier(parts)
        part_times.append(_times(part, lambda: _barrier(parts)))
        _barrier(parts)
    # the first round is a warm-up
    result = {"parts": _timing(part_times[1:], activation_bytes(part, *parameters))}
    if fabric.rank == 0:
        result["whole"] = _timing(whole_times[1:], activation_bytes(whole, *parameters))
    return result


def _layers(case: Case, parts: Parts) -> tuple[Forward, Forward, Sequence[Tensor]]:
    """(forward pass of the whole layer, that of this part, parameters)."""
    generator = torch.Generator().manual_seed(0)
    shape = case.batch, case.channels, case.size, case.size
    image = torch.randn(shape, generator=generator)
    weight = torch.randn(case.channels, case.channels, case.kernel, case.kernel, generator=generator) * 0.04
    weight.requires_grad_()
    part = scatter(image, parts)
    part = part.like(part.local.contiguous())
    # the other members do not keep the whole image
    return _layer(part if parts.rank else image, weight, case), _layer(part, weight, case), [weight]


def _nets(
    make: Callable[[], nn.Module], case: Case, parts: Parts
) -> tuple[Forward, Forward, Sequence[Tensor]]:
    """Like ``_layers``, for a net and its loss."""

    def step(net: nn.Module) -> Forward:
        images, labels = batch_for(net, (case.size, case.size), case.batch, torch.float32)
        return lambda: (images, functional.cross_entropy(net(images), labels))

    torch.manual_seed(0)  # all parts have the same parameters
    whole, part = make(), make()
    parameters = [*whole.parameters(), *part.parameters()]
    return step(whole), step(parallelize(part, parts)), parameters


def _timing(times: list[tuple[float, ...]], size: int) -> Timing:
    forward, backward, cpu = (list(column) for column in zip(*times, strict=True))
    return Timing(forward, backward, cpu, size)


def _barrier(parts: Parts) -> None:
    parts.sum(torch.zeros(1))


def _layer(x: Tensor, weight: Tensor, case: Case) -> Forward:
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


def _times(forward: Forward, barrier: Callable[[], None] = lambda: None) -> tuple[float, float, float]:
    """Seconds of a forward pass, and of a backward pass, before which members wait at ``barrier``; and CPU
    seconds of both."""
    start, cpu_start = time.perf_counter(), time.process_time()
    _, y = forward()
    forward_end, forward_cpu = time.perf_counter(), time.process_time() - cpu_start
    gradient = torch.ones_like(y)
    barrier()
    backward_start, cpu_start = time.perf_counter(), time.process_time()
    y.backward(gradient)  # type: ignore[no-untyped-call]
    backward_end, backward_cpu = time.perf_counter(), time.process_time() - cpu_start
    return forward_end - start, backward_end - backward_start, forward_cpu + backward_cpu


def activation_bytes(forward: Forward, *parameters: Tensor) -> int:
    """Bytes of the output and of what is kept for the backward pass, without ``parameters``."""
    saved_bytes: dict[int, int] = {}
    parameter_storages = {p.untyped_storage().data_ptr() for p in parameters}
    # kept alive, so that no two storages have the same address
    saved_tensors: list[Any] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
            saved_tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, y = forward()
    saved_bytes[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
    return sum(saved_bytes.values())
