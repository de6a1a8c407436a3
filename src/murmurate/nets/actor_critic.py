"""Actor-critic nets: a policy and a value function over a torso."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from murmurate.nets.action_mask import ActionMask, action_mask, masked
from murmurate.nets.initialize import orthogonal_
from murmurate.nets.moments import observation_normalizer
from murmurate.nets.precision import first_dtype
from murmurate.nets.recurrent import LSTMCore
from murmurate.nets.torso import AUTO, build_torso, seeded_by
from murmurate.spec import EnvSpec


class GaussianHead(nn.Module):
    """Mean and log standard deviation of a diagonal Gaussian; log_std does not depend on the state.

    The parameters of the policy are [..., 2 D]: ``mean, log_std = parameters.chunk(2, -1)``.
    """

    def __init__(self, in_features: int, actions: int) -> None:
        super().__init__()
        self.mean = nn.Linear(in_features, actions)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., F] to the policy's parameters [..., 2 D]."""
        mean = self.mean(features)
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)


def policy_head(features: int, spec: EnvSpec) -> nn.Module:
    """A head from features [..., F] to logits [..., A] of discrete actions (with ``spec.factors``, those of
    all factors side by side), or to the parameters of a Gaussian."""
    if spec.categorical:
        return nn.Linear(features, spec.actions or sum(spec.factors))
    return GaussianHead(features, math.prod(spec.action_shape))


class ActorCritic(nn.Module):
    """A torso, optionally a recurrent core, a policy head and a value head.

    The heads' results are converted to float32. Features are cast to each head's dtype, so a bfloat16 torso
    can have float32 heads.

    Args:
        torso: observations [B, ...] to features [B, F].
        core: an ``LSTMCore`` between torso and heads, or None.
        policy_head: features to the policy's parameters [..., A].
        value_head: features to [..., 1].
        value_torso: a separate torso of the value function; None: the value function shares ``torso``.

    Attributes:
        normalizer: module that normalises observations for the torsos; None: they are not normalised.
        mask: masks the logits of illegal actions; None: all actions are legal.

    Raises:
        ValueError: for a core together with a value torso, because the core would serve only one torso.
    """

    def __init__(
        self,
        torso: nn.Module,
        core: LSTMCore | None,
        policy_head: nn.Module,
        value_head: nn.Module,
        value_torso: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if core is not None and value_torso is not None:
            raise ValueError("a recurrent net has one torso: leave out value_torso, or the core")
        self.torso = torso
        self.core = core
        self.policy_head = policy_head
        self.value_head = value_head
        self.value_torso = value_torso
        self.normalizer: nn.Module | None = None
        self.mask: ActionMask | None = None

    def initial_memory(self, batch: int) -> Tensor | None:
        """Zeros [batch, M]; None without a recurrent core."""
        return None if self.core is None else self.core.initial_memory(batch)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """One step of a net that is not recurrent.

        Args:
            observation: [B, ...].

        Returns:
            The policy's parameters [B, A] (logits, or mean and log_std) and the values [B], float32.

        Raises:
            ValueError: if the net has a recurrent core.
        """
        if self.core is not None:
            raise ValueError("this net is recurrent: call unroll with its memory, not forward")
        normalised = self._normalised(observation)
        return self._heads(self.torso(normalised), normalised, observation)

    def policy(self, observation: Tensor) -> Tensor:
        """The policy's parameters of ``forward``, without the time for the values. Raises ValueError too."""
        if self.core is not None:
            raise ValueError("this net is recurrent: call unroll with its memory, not policy")
        return self._policy(self.torso(self._normalised(observation)), observation)

    def unroll(
        self, observation: Tensor, memory: Tensor | None, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All steps of a rollout. The memory is reset where an episode begins.

        Args:
            observation: [T, B, ...].
            memory: recurrent state before step 0 [B, M]; None without a recurrent core.
            first: bool [T, B]: observation t begins an episode.

        Returns:
            The policy's parameters [T, B, A] and the values [T, B], float32, and the memory after step T.

        Raises:
            ValueError: if the shapes do not match, or a recurrent net gets no memory.
        """
        steps, batch = first.shape
        if observation.shape[:2] != first.shape:
            raise ValueError(
                f"observation [T, B, ...] and first [T, B] do not match: they are "
                f"{list(observation.shape)} and {list(first.shape)}"
            )
        flat = observation.flatten(0, 1)
        normalised = self._normalised(flat)
        features = self.torso(normalised)
        if self.core is not None:
            if memory is None:
                raise ValueError(
                    "this net is recurrent: give unroll a memory, at first initial_memory(batch)"
                )
            features, memory = self.core(features.view(steps, batch, -1), memory, first)
            features = features.flatten(0, 1)
        policy, value = self._heads(features, normalised, flat)
        return policy.view(steps, batch, -1), value.view(steps, batch), memory

    def _normalised(self, observation: Tensor) -> Tensor:
        return observation if self.normalizer is None else self.normalizer(observation)

    def _heads(self, features: Tensor, normalised: Tensor, observation: Tensor) -> tuple[Tensor, Tensor]:
        value_features = features if self.value_torso is None else self.value_torso(normalised)
        value = self.value_head(value_features.to(first_dtype(self.value_head)))
        return self._policy(features, observation), value.squeeze(-1).float()

    def _policy(self, features: Tensor, observation: Tensor) -> Tensor:
        policy: Tensor = self.policy_head(features.to(first_dtype(self.policy_head)))
        return masked(policy, observation, self.mask)


def actor_critic(
    spec: EnvSpec,
    *,
    generator: torch.Generator,
    torso: str = AUTO,
    hidden: Sequence[int] = (64, 64),
    recurrent: int = 0,
    normalize: bool = False,
) -> ActorCritic:
    """The net for a world, orthogonally initialised: gain sqrt(2) in the torso, 0.01 in the policy head, and
    1 in the value head.

    Without a recurrent core, policy and value have separate torsos if the torso's attribute ``shared`` is
    False, as an MLP's is.

    Args:
        spec: the world.
        generator: generator of all weights; the global generator does not change.
        torso: name of the torso (``nets/torso.py``); "auto" is ``usual_torso``.
        hidden: widths of the MLP's layers (tanh).
        recurrent: width of an LSTM between torso and heads (orthogonal, gain 1); 0 for none.
        normalize: whether to normalise observations by their running moments (``nets/moments.py``).

    Raises:
        ValueError: for an unknown torso, or one that cannot read the world's observations.
    """
    with seeded_by(generator):
        net = _build(spec, torso, hidden, recurrent)
    net.normalizer, net.mask = observation_normalizer(spec, normalize), action_mask(spec)
    for trunk in (net.torso, net.value_torso):
        if trunk is not None:
            orthogonal_(trunk, math.sqrt(2.0), generator)
    if net.core is not None:
        orthogonal_(net.core, 1.0, generator)
    orthogonal_(net.policy_head, 0.01, generator)
    orthogonal_(net.value_head, 1.0, generator)
    return net


def _build(spec: EnvSpec, torso: str, hidden: Sequence[int], recurrent: int) -> ActorCritic:
    trunk = build_torso(spec, torso, hidden)
    features: int = trunk.out_features  # type: ignore[assignment]
    value_trunk: nn.Module | None = None
    if not getattr(trunk, "shared", True) and not recurrent:
        value_trunk = build_torso(spec, torso, hidden)
    core = LSTMCore(features, recurrent) if recurrent else None
    features = recurrent or features
    return ActorCritic(trunk, core, policy_head(features, spec), nn.Linear(features, 1), value_trunk)
