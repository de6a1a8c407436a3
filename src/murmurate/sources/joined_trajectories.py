"""Joins trajectories of several actors into one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmurate.sources.trajectory_ring import TrajectoryShape
from murmurate.spec import Trajectory

_TIME_MAJOR = ("observation", "action", "reward", "terminated", "truncated", "first")  # [T, B, ...]


class JoinedTrajectories:
    """Tensors of a batch of ``count`` trajectories side by side, allocated once.

    shape: shape of each trajectory. device: device of the batch. For a GPU the host's memory is pinned;
    it may be written again only when the copies to the GPU have ended.
    """

    def __init__(self, shape: TrajectoryShape, count: int, device: torch.device) -> None:
        self._size, self._device = shape.size, device
        self._has_memory = shape.memory > 0
        joined = TrajectoryShape(shape.spec, shape.steps, shape.size * count, shape.memory, shape.behaviour)
        pin = device.type == "cuda"
        self._tensors = {
            name: torch.zeros(field_shape, dtype=dtype, pin_memory=pin)
            for name, (field_shape, dtype) in joined.fields().items()
            if name not in ("episodes", "header", "truncated_observation")
        }
        self._behaviour = [name for name in self._tensors if name.startswith("behaviour.")]
        # the final observations of truncated episodes, of each trajectory
        self._finals: list[Tensor | None] = [None] * count

    def put(self, index: int, data: Trajectory) -> None:
        """Copy ``data`` to trajectory ``index`` of the batch."""
        part = slice(index * self._size, (index + 1) * self._size)
        for name in _TIME_MAJOR:
            self._tensors[name][:, part].copy_(getattr(data, name))
        for name in self._behaviour:
            self._tensors[name][:, part].copy_(data.behaviour[name.partition(".")[2]])
        self._tensors["last_observation"][part].copy_(data.last_observation)
        if data.memory is not None:
            self._tensors["memory"][part].copy_(data.memory)
        final = data.truncated_observation
        self._finals[index] = None if final is None else final.clone()

    def trajectory(self) -> Trajectory:
        """All ``count`` trajectories as one; valid until the next ``put``."""
        on_device = {name: x.to(self._device, non_blocking=True) for name, x in self._tensors.items()}
        final = join_row_major(self._tensors["truncated"], self._finals)
        return Trajectory(
            **{name: on_device[name] for name in _TIME_MAJOR},
            last_observation=on_device["last_observation"],
            truncated_observation=None if final is None else final.to(self._device),
            memory=on_device["memory"] if self._has_memory else None,
            behaviour={name.partition(".")[2]: on_device[name] for name in self._behaviour},
        )


def join_row_major(truncated: Tensor, finals: Sequence[Tensor | None]) -> Tensor | None:
    """[K, ...]: final observations in the row-major order of ``truncated`` [T, B]; None if no step was
    truncated. finals: the columns are divided into equal groups; for each group, its final observations in
    row-major order."""
    rows = torch.full(truncated.shape, -1)  # of each truncated step: its row in the result
    count = int(truncated.sum())
    rows[truncated] = torch.arange(count)
    joined: Tensor | None = None
    for final, group_rows in zip(finals, rows.chunk(len(finals), 1), strict=True):
        if final is None:
            continue
        if joined is None:
            joined = torch.empty((count, *final.shape[1:]), dtype=final.dtype)
        joined[group_rows[group_rows >= 0]] = final
    return joined
