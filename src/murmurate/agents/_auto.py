"""Shared by agents: resolving ``auto`` in configs, and a replica with a config's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from murmurate.nets.parts import PartsTorso
from murmurate.nets.precision import faster_precision
from murmurate.nets.torso import AUTO, usual_torso
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec

Config = TypeVar("Config")


def resolve_auto(config: Config, spec: EnvSpec, device: torch.device) -> Config:
    """``config`` with the ``torso`` and ``precision`` that ``auto`` stands for: ``usual_torso``; for
    images the precision in which the device is faster, except in a net of the user's own, which is
    float32."""
    fields: Any = config
    torso, precision = fields.torso, fields.precision
    if torso == AUTO:
        torso = usual_torso(spec)
    if precision == "auto":
        is_own_net = bool(getattr(fields, "network", ""))
        images = spec.images or (spec.holds_images and torso != "mlp")
        precision = faster_precision(device) if images and not is_own_net else "float32"
    resolved: Config = dataclasses.replace(fields, torso=torso, precision=precision)
    return resolved


def linear_schedule(end: float, updates: int | None) -> Callable[[int], float] | None:
    """The factor of the learning rate as a function of the clock: from 1 to ``end`` over ``updates``; None
    if it is constant."""
    if updates is None or end == 1.0:
        return None
    planned = updates
    return lambda clock: 1.0 + (end - 1.0) * min(clock / planned, 1.0)


def replicated(
    config: Any,
    context: Context,
    net: nn.Module,
    optimizer: Callable[[list[Any]], torch.optim.Optimizer],
) -> Replica:
    """``net`` as the replica called ``config.name``, with the clip, the schedule and the precision of a
    resolved ``config``: the torso computes in that precision, and the rest in float32, also the layers that
    read numbers beside images."""
    beside = tuple(f"{name}.mlp." for name, part in net.named_modules() if isinstance(part, PartsTorso))

    def in_compute(name: str) -> bool:
        return name.startswith(("torso.", "value_torso.")) and not name.startswith(beside)

    return context.replicate(
        config.name,
        net,
        optimizer,
        clip=config.clip,
        schedule=linear_schedule(config.learning_rate_end, context.updates),
        compute_dtype=torch.bfloat16 if config.precision == "bfloat16" else None,
        in_compute=in_compute,
    )
