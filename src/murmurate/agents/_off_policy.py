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
    """Methods of an ``Agent`` that acts by its replica ``policy``, without memory, and alike in all
    simulators."""

    acting: tuple[str, ...] = ("policy",)

    def assign_simulators(self, first: int, total: int) -> None:
        """Exploration does not differ between simulators."""

    def initial_memory(self, batch: int) -> Tensor | None:
        return None


def check_vector_actions(spec: EnvSpec, agent: str, images: bool = False) -> None:
    """Raise ValueError for discrete actions, for actions without bounds, and for images unless ``images``."""
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
    """A replica with Adam. low: whether products between hidden layers, and the torsos of images, are
    computed in bfloat16."""
    bfloat16 = _between_hidden_layers(module) | _in_torsos(module)
    return context.replicate(
        name,
        module,
        lambda parameters: Adam(parameters, lr=rate),
        clip=clip,
        compute_dtype=torch.bfloat16 if low and bfloat16 else None,
        in_compute=lambda parameter: parameter in bfloat16,
    )


def _between_hidden_layers(module: nn.Module) -> set[str]:
    """Names of the parameters between hidden layers. The first and the last layer stay float32: few inputs
    make the first fast, and values need more than the eight bits of bfloat16."""
    names = set()
    for name, part in module.named_modules():
        if isinstance(part, BatchedMLP):
            for layer in range(1, len(part.weights) - 1):
                prefix = f"{name}." if name else ""
                names |= {f"{prefix}weights.{layer}", f"{prefix}biases.{layer}"}
    return names


def _in_torsos(module: nn.Module) -> set[str]:
    """Names of the parameters of encoders' torsos."""
    torsos = [f"{name}.torso." for name, part in module.named_modules() if isinstance(part, PixelEncoder)]
    return {name for name, _ in module.named_parameters() if name.startswith(tuple(torsos))}


def passes(replica: Replica, net: BatchedMLP, prefix: str = "") -> Passes:
    """Passes through ``net`` that write into the replica's gradient. prefix: prefix that the names of the
    net's parameters have in the replica."""
    names = replica.named_views(replica.grad)
    return Passes(net, {n.removeprefix(prefix): view for n, view in names if n.startswith(prefix)})
