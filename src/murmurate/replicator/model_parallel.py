"""A replica over several devices, with one flat vector on each (TF-Replicator, section 3.2)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.replica.clipping import check_loss, check_norm, checked_clip, factor
from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.optimizer_wrapper import ParameterModule


def parameters_by_device(
    module: nn.Module, devices: Sequence[torch.device], placed: Callable[[str], int] | None
) -> dict[int, ParameterModule]:
    """The trainable parameters of ``module`` by the number of their device among ``devices``, ascending.

    The first also has the buffers of ``module``, wherever they are, so that they are saved once. placed: from
    a parameter's name to that number; None: the device that holds the parameter. Raises Refusal for a
    parameter on another device.
    """
    shares: dict[int, dict[str, nn.Parameter]] = {}
    for label, parameter in module.named_parameters():
        if parameter.requires_grad:
            k = devices.index(parameter.device) if placed is None else placed(label)
            if not 0 <= k < len(devices):
                raise IndexError(f"a replica has {len(devices)} devices, there is no {k}: give more devices")
            if parameter.device != devices[k]:
                raise Refusal(f"'{label}' is not on device {k} ({devices[k]}): move it there first")
            shares.setdefault(k, {})[label] = parameter
    first = min(shares, default=0)
    return {
        k: ParameterModule.of(share, module if k == first else None) for k, share in sorted(shares.items())
    }


class ModelParallelReplica:
    """The shards of a model-parallel replica: one backward pass for all, one step of the strategy for each.

    clip: largest norm of the whole gradient, over all shards together and after any averaging.
    """

    def __init__(self, name: str, shards: Sequence[Replica], clip: float | None) -> None:
        self.name, self.shards, self.clip = name, list(shards), checked_clip(clip)
        self.gradient_norm: Tensor | None = None

    @property
    def clock(self) -> int:
        return self.shards[0].clock

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def descend(self, loss: Tensor) -> Exchange:
        """As ``Replica.descend``, for the parameters of all shards. Raises NotFinite before any change."""
        check_loss(loss, self.name, self.clock)
        parameters = [p for shard in self.shards for p in shard.own_parameters()]
        gradients = iter(torch.autograd.grad(loss, parameters, allow_unused=True))
        for shard in self.shards:
            shard.write_gradients(itertools.islice(gradients, len(shard.slices)))
        return self.follow([shard.grad for shard in self.shards])

    def follow(self, gradients: Sequence[Tensor]) -> Exchange:
        """One step along closed-form gradients, one [N_k] for each shard."""
        if self.clip is None:
            exchanges = [s.follow(g) for s, g in zip(self.shards, gradients, strict=True)]
        else:
            exchanges = self._step_clipped(gradients)
        return Exchange(
            round=min(e.round for e in exchanges),
            heard=min(e.heard for e in exchanges),
            staleness=max(e.staleness for e in exchanges),
        )

    def _step_clipped(self, gradients: Sequence[Tensor]) -> list[Exchange]:
        """Every shard's step, with all gradients clipped by their common norm before the first update.

        A strategy is one function that averages and then updates, and the norm is that of the averaged
        gradients of all shards. So each shard's update first runs the steps of the shards after it: the last
        of them clips all gradients, and then the updates follow, from the last shard to the first.
        """
        exchanges: dict[int, Exchange] = {}
        waiting: list[Replica] = []

        def step_from(k: int) -> None:
            if k == len(self.shards):
                if waiting:
                    self._clip(waiting)
                return
            shard = self.shards[k]
            update, updated = shard.update, False

            def update_after_the_others() -> None:
                nonlocal updated
                if not updated:
                    updated = True
                    waiting.append(shard)
                    step_from(k + 1)
                update()

            shard.update = update_after_the_others  # type: ignore[method-assign]
            try:
                exchanges[k] = shard.follow(gradients[k])
            finally:
                del shard.update
            if not updated:  # a strategy may skip the local update
                step_from(k + 1)

        step_from(0)
        return [exchanges[k] for k in range(len(self.shards))]

    def _clip(self, shards: Sequence[Replica]) -> None:
        """Clip the gradients of these shards by their common norm."""
        device = shards[0].device
        norms = torch.stack([torch.linalg.vector_norm(s.grad).to(device) for s in shards])
        norm = torch.linalg.vector_norm(norms)
        check_norm(norm.item(), self.name, self.clock)
        self.gradient_norm = norm
        scale = factor(norm, math.inf if self.clip is None else self.clip)
        for shard in shards:
            shard.gradient_norm = norm.to(shard.device)
            shard.grad.mul_(scale.to(shard.device))

    def state(self) -> dict[str, Any]:
        return {shard.name: shard.state() for shard in self.shards}

    def load(self, state: dict[str, Any]) -> None:
        for shard in self.shards:
            shard.load(state[shard.name])
