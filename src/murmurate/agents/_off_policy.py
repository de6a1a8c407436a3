"""Shared by agents that learn vector actions from a replay: checks, replicas, precision, statistics."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.nets.d4pg import PixelEncoder
from murmurate.nets.passes import Passes
from murmurate.replica.adam import Adam
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec


class ActsByPolicy:
    """An ``Agent``'s methods for acting by its replica ``policy``: no memory, all simulators alike."""

    acting: tuple[str, ...] = ("policy",)

    def assign_simulators(self, first: int, total: int) -> None:
        """Exploration does not differ between simulators."""

    def initial_memory(self, batch: int) -> Tensor | None:
        return None


def check_vector_actions(spec: EnvSpec, agent: str, images: bool = False) -> None:
    """Raise ValueError for discrete actions, for actions without bounds, and unless ``images`` for images."""
    if spec.categorical:
        other = "dqn" if spec.actions else "ppo"
        raise ValueError(f"{agent} needs vector actions, and those of {spec.name} are discrete: use {other}")
    if spec.images and not images:
        raise ValueError(f"{agent} reads vectors, and the observations of {spec.name} are images: use d4pg")
    if not all(map(math.isfinite, (*spec.action_low, *spec.action_high))):
        raise ValueError(
            f"{agent} learns actions scaled by their bounds, and {spec.name} has actions without bounds. "
            "Register it with gymnasium's RescaleAction or ClipAction among its additional_wrappers."
        )


def replicate(
    context: Context, name: str, module: nn.Module, rate: float, clip: float | None, low: bool
) -> Replica:
    """A replica with Adam. low: whether the products between hidden layers, and torsos of images, are
    computed in bfloat16."""
    hidden = _between_hidden(module) | _of_torsos(module)
    return context.replicate(
        name,
        module,
        lambda parameters: Adam(parameters, lr=rate),
        clip=clip,
        compute_dtype=torch.bfloat16 if low and hidden else None,
        in_compute=lambda parameter: parameter in hidden,
    )


def _between_hidden(module: nn.Module) -> set[str]:
    """The parameters of the layers between hidden ones. The first and the last stay float32: few inputs make
    the first fast, and values need more than the eight bits of bfloat16."""
    found = set()
    for name, part in module.named_modules():
        if isinstance(part, BatchedMLP):
            for layer in range(1, len(part.weights) - 1):
                prefix = f"{name}." if name else ""
                found |= {f"{prefix}weights.{layer}", f"{prefix}biases.{layer}"}
    return found


def _of_torsos(module: nn.Module) -> set[str]:
    """The parameters of encoders' torsos."""
    torsos = [f"{name}.torso." for name, part in module.named_modules() if isinstance(part, PixelEncoder)]
    return {name for name, _ in module.named_parameters() if name.startswith(tuple(torsos))}


def passes(replica: Replica, net: BatchedMLP, prefix: str = "") -> Passes:
    """Passes through ``net`` that write into the replica's gradient. prefix: prefix of its parameters'
    names."""
    names = replica.named_views(replica.grad)
    return Passes(net, {n.removeprefix(prefix): view for n, view in names if n.startswith(prefix)})
