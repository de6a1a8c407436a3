"""Shared by agents that learn vector actions from a replay: checks, replicas and their precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from murmurate.nets.batched_mlp import BatchedMLP
from murmurate.nets.control import ControlPolicy, critics
from murmurate.nets.d4pg import PixelEncoder
from murmurate.nets.mlp import layer_widths
from murmurate.nets.own_control import OwnNets, OwnPasses, own_nets
from murmurate.nets.passes import Passes
from murmurate.replica.adam import Adam
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec, derive_generator


def check_vector_actions(spec: EnvSpec, agent: str, images: bool = False, parts: bool = False) -> None:
    """Raise ValueError for discrete actions, for actions without bounds, for images unless ``images``, and
    for images that are parts of observations unless ``parts``."""
    if spec.categorical:
        remedy = "dqn" if spec.actions else "ppo"
        raise ValueError(f"{agent} needs vector actions, and those of {spec.name} are discrete: use {remedy}")
    names = [name for name, _, _, shape in spec.parts if shape]
    if names and not parts:
        raise ValueError(
            f"{agent} reads vectors, and the observations of {spec.name} hold the image '{names[0]}': choose "
            "other keys of a Dict with --world.observe KEY,..., or give sac, td3 or ddpg nets of your own "
            "(--agent.network)"
        )
    if spec.images and not images:
        raise ValueError(
            f"{agent} reads vectors, and the observations of {spec.name} are images: use d4pg, or nets of "
            "your own, which sac, td3 and ddpg take (--agent.network)"
        )
    # high - low must be finite in float32, the dtype in which actions are scaled
    bounds = zip(spec.action_low, spec.action_high, strict=True)
    if not all(high - low <= float(np.finfo(np.float32).max) for low, high in bounds):
        raise ValueError(
            f"{agent} learns actions scaled by their bounds, and {spec.name} has actions without bounds. "
            "Give it an action_space with finite bounds in a function that makes it (--env FILE.py:NAME, "
            "also for a registered id): return gymnasium.wrappers.TransformAction(env, lambda action: "
            f"action, gymnasium.spaces.Box(-1.0, 1.0, {tuple(spec.action_shape)}))"
        )


def replicate(
    context: Context, name: str, module: nn.Module, rate: float, clip: float | None, use_bfloat16: bool
) -> Replica:
    """A replica with Adam. use_bfloat16: whether products between hidden layers, and the torsos of images,
    are computed in bfloat16."""
    bfloat16_names = _between_hidden_layers(module) | _in_torsos(module)
    return context.replicate(
        name,
        module,
        lambda parameters: Adam(parameters, lr=rate),
        clip=clip,
        compute_dtype=torch.bfloat16 if use_bfloat16 and bfloat16_names else None,
        in_compute=lambda parameter_name: parameter_name in bfloat16_names,
    )


def _between_hidden_layers(module: nn.Module) -> set[str]:
    """Names of the parameters between hidden layers. The first and the last layer stay float32: few inputs
    make the first fast, and values need more than the eight bits of bfloat16."""
    names = set()
    for name, net in module.named_modules():
        if isinstance(net, BatchedMLP):
            for layer in range(1, len(net.weights) - 1):
                prefix = f"{name}." if name else ""
                names |= {f"{prefix}weights.{layer}", f"{prefix}biases.{layer}"}
    return names


def _in_torsos(module: nn.Module) -> set[str]:
    """Names of the parameters of encoders' torsos."""
    prefixes = [f"{name}.torso." for name, net in module.named_modules() if isinstance(net, PixelEncoder)]
    return {name for name, _ in module.named_parameters() if name.startswith(tuple(prefixes))}


def passes(replica: Replica, net: BatchedMLP | OwnNets, prefix: str = "") -> Passes | OwnPasses:
    """Passes through ``net`` that write into the replica's gradient. prefix: prefix that the names of the
    net's parameters have in the replica."""
    names = replica.named_views(replica.grad)
    gradient = {n.removeprefix(prefix): view for n, view in names if n.startswith(prefix)}
    return OwnPasses(net, gradient) if isinstance(net, OwnNets) else Passes(net, gradient)


def target_passes(net: BatchedMLP | OwnNets) -> Passes | OwnPasses:
    """Passes through a target net, which never learns."""
    return OwnPasses(net) if isinstance(net, OwnNets) else Passes(net)


def policy_and_critics(
    config: Any, context: Context, critics_count: int, *, deterministic: bool
) -> tuple[ControlPolicy, BatchedMLP | OwnNets]:
    """The nets of ``config``, a ``TD3`` or a config with its fields ``hidden``, ``normalize_observations``,
    ``network`` and ``precision``, on the context's device."""
    spec, normalized = context.spec, config.normalize_observations
    check_vector_actions(spec, config.name, images=bool(config.network), parts=bool(config.network))
    generator, hidden = derive_generator(context.seed, "network"), layer_widths(config.hidden)
    options: dict[str, Any] = {"deterministic": deterministic, "generator": generator}
    if not config.network:
        policy = ControlPolicy(spec, hidden, normalize=normalized, **options)
        several = critics(spec, hidden, critics_count, generator=generator)
        return policy.to(context.device), several.to(context.device)
    if config.precision == "bfloat16":
        raise ValueError("precision bfloat16 is for nets of the agent's own: with network use float32")
    own_policy, own_critics = own_nets(
        spec, config.network, hidden, critics_count, normalized=normalized, **options
    )
    policy = ControlPolicy(spec, hidden, normalize=normalized, own=own_policy, **options)
    return policy.to(context.device), own_critics.to(context.device)
