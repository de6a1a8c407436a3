"""Whole nets of the user's own: ``module:NAME`` or ``FILE.py:NAME`` in place of a torso and its heads.

``NAME`` is a class or function that makes the net, a torch module, from (spec, hidden), as for a torso. A net
for a policy and its values maps observations [B, ...] to (parameters of the policy [B, A], values [B] or
[B, 1]); a net for action values maps them to [B, A]. A is the number of discrete actions (with
``spec.factors``, the sum of these); for vector actions it is twice their dimension, for mean and log
standard deviation side by side. Observations are of the world's dtype.

A net with memory has ``initial_memory(batch)`` [batch, M], and maps (observations, memory [B, M]) to
(parameters, values, memory): one step at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from murmurate import plugins
from murmurate.nets.action_mask import ActionMask, action_mask, masked
from murmurate.nets.actor_critic import ActorCritic, actor_critic
from murmurate.nets.moments import observation_normalizer
from murmurate.nets.q_network import QNetwork, q_network
from murmurate.nets.torso import AUTO, described, seeded_by, trial_result
from murmurate.spec import EnvSpec

_OPTION = "--agent.network"


class OwnActorCritic(nn.Module):
    """A net of the user's with the methods of ``ActorCritic``.

    normalizer: module that normalises observations for the net; None: they are not normalised. mask: masks
    the logits of illegal actions; None: all actions are legal.
    """

    def __init__(
        self, network: nn.Module, normalizer: nn.Module | None = None, mask: ActionMask | None = None
    ) -> None:
        super().__init__()
        self.network, self.normalizer, self.mask = network, normalizer, mask
        self.recurrent = hasattr(network, "initial_memory")

    def initial_memory(self, batch: int) -> Tensor | None:
        """The net's initial memory [batch, M]; None for a net without memory."""
        if not self.recurrent:
            return None
        memory: Tensor = self.network.initial_memory(batch)  # type: ignore[operator]
        return memory

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """As ``ActorCritic.forward``. Raises ValueError if the net has memory."""
        if self.recurrent:
            raise ValueError("this net is recurrent: call unroll with its memory, not forward")
        policy, value = self.network(self._normalised(observation))
        return masked(policy, observation, self.mask), value.reshape(policy.shape[0]).float()

    def unroll(
        self, observation: Tensor, memory: Tensor | None, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As ``ActorCritic.unroll``."""
        steps, batch = first.shape
        if not self.recurrent:
            policy, value = self(observation.flatten(0, 1))
            return policy.view(steps, batch, -1), value.view(steps, batch), None
        if memory is None:
            raise ValueError("this net is recurrent: give unroll a memory, at first initial_memory(batch)")
        policies, values = [], []
        # the net may make it on the CPU, wherever its parameters are
        initial: Tensor = self.network.initial_memory(batch).to(first.device)  # type: ignore[operator]
        memory = memory.to(first.device)
        for seen, begins in zip(observation.unbind(0), first.unbind(0), strict=True):
            memory = torch.where(begins[:, None], initial, memory)
            policy, value, memory = self.network(self._normalised(seen), memory)
            policies.append(masked(policy, seen, self.mask))
            values.append(value.reshape(batch).float())
        return torch.stack(policies), torch.stack(values), memory.float()

    def _normalised(self, observation: Tensor) -> Tensor:
        return observation if self.normalizer is None else self.normalizer(observation)


class OwnQNetwork(nn.Module):
    """A net of the user's with the methods of ``QNetwork``."""

    def __init__(
        self, network: nn.Module, normalizer: nn.Module | None = None, mask: ActionMask | None = None
    ) -> None:
        super().__init__()
        self.network, self.normalizer, self.mask = network, normalizer, mask

    def preprocess(self, observation: Tensor) -> Tensor:
        """Observations as they are: see ``QNetwork``."""
        return observation

    def forward(self, observation: Tensor) -> Tensor:
        """Observations [B, ...] to Q(s, .) [B, A]."""
        seen = observation if self.normalizer is None else self.normalizer(observation)
        return masked(self.network(seen), observation, self.mask)


PolicyValueNet = ActorCritic | OwnActorCritic
ActionValueNet = QNetwork | OwnQNetwork


def policy_value_net(
    spec: EnvSpec,
    *,
    network: str,
    generator: torch.Generator,
    torso: str = AUTO,
    hidden: Sequence[int] = (64, 64),
    recurrent: int = 0,
    normalize: bool = False,
) -> PolicyValueNet:
    """The net called ``network``, with the initial weights that it draws; if the name is empty,
    ``actor_critic`` with the other arguments.

    Raises:
        ValueError: if there is no such net, if it raises or returns other shapes, and for ``recurrent``
            beside it; and as ``actor_critic``.
    """
    if not network:
        return actor_critic(
            spec, torso=torso, hidden=hidden, recurrent=recurrent, normalize=normalize, generator=generator
        )
    if recurrent:
        raise ValueError("recurrent is an LSTM behind a torso, and network is a whole net: leave one out")
    normalizer, mask = observation_normalizer(spec, normalize), action_mask(spec)
    with seeded_by(generator):
        net = OwnActorCritic(_make_net(spec, network, hidden), normalizer, mask)
        try:
            memory = net.initial_memory(2)
        except Exception as error:
            cause = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise ValueError(f"initial_memory of the net {network} raised {cause}") from error
        if memory is not None and not (isinstance(memory, Tensor) and memory.ndim == 2 and len(memory) == 2):
            raise ValueError(
                f"initial_memory of the net {network} must return a tensor [B, M], and for B = 2 it returns "
                f"{described(memory)}"
            )
        memories = () if memory is None else (memory,)
        result = trial_result(f"the net {network}", net.network, spec, *memories)
    size = spec.actions or sum(spec.factors) or 2 * math.prod(spec.action_shape)
    count = 2 if memory is None else 3
    is_right = isinstance(result, tuple) and all(isinstance(part, Tensor) for part in result)
    if not is_right or len(result) != count:
        expected = "(parameters of the policy, values)" if memory is None else "(parameters, values, memory)"
        raise ValueError(f"the net {network} must return {expected}, and it returns {described(result)}")
    if result[0].shape != (2, size) or result[1].numel() != 2:
        raise ValueError(
            f"the net {network} must return parameters [B, {size}] and values [B], and for 2 observations it "
            f"returns {described(result)}"
        )
    if memory is not None and result[2].shape != memory.shape:
        raise ValueError(
            f"the net {network} must return a memory {list(memory.shape)}, as initial_memory does, and it "
            f"returns {list(result[2].shape)}"
        )
    return net


def action_value_net(
    spec: EnvSpec,
    *,
    network: str,
    generator: torch.Generator,
    torso: str = AUTO,
    hidden: Sequence[int] = (128, 128),
    dueling: bool = False,
    normalize: bool = False,
) -> ActionValueNet:
    """As ``policy_value_net``, for action values: if the name is empty, ``q_network``."""
    if not network or not spec.actions:  # q_network refuses other actions than discrete ones
        return q_network(
            spec, generator=generator, torso=torso, hidden=hidden, dueling=dueling, normalize=normalize
        )
    normalizer, mask = observation_normalizer(spec, normalize), action_mask(spec)
    with seeded_by(generator):
        net = OwnQNetwork(_make_net(spec, network, hidden), normalizer, mask)
        result = trial_result(f"the net {network}", net.network, spec)
    if not isinstance(result, Tensor) or result.shape != (2, spec.actions):
        raise ValueError(
            f"the net {network} must return action values [B, {spec.actions}], and for 2 observations it "
            f"returns {described(result)}"
        )
    return net


def checked_network(name: str) -> str:
    """``name``, with an absolute path for a file. Raises ValueError for a name without a colon."""
    if name and ":" not in name:
        raise ValueError(f"there is no net called '{name}': use FILE.py:NAME or module:NAME")
    return plugins.resumable_name(name)


def refuse_low_precision(network: str, precision: str) -> None:
    """Raise ValueError if a whole net is to compute in bfloat16, which only torsos can."""
    if network and precision == "bfloat16":
        raise ValueError("precision bfloat16 is for torsos, and network is a whole net: use float32")


def made_by(network: str, spec: EnvSpec, hidden: Sequence[int]) -> Any:
    """What the class or function ``network`` makes. Raises ValueError if there is none, or if it raises.

    Call it, and then the net for the first time, in one context ``seeded_by``: lazy layers draw their initial
    weights in the first call.
    """
    return plugins.call_named(network, "net", _OPTION, spec, hidden)


def _make_net(spec: EnvSpec, network: str, hidden: Sequence[int]) -> nn.Module:
    net = made_by(network, spec, hidden)
    if not isinstance(net, nn.Module):
        raise ValueError(f"the net {network} is of type {type(net).__name__}, and must be a torch.nn.Module")
    return net
