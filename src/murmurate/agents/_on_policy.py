"""Shared by agents that learn from rollouts: steps of an actor-critic net, bootstrap values, advantages, and
actions and probabilities from a policy's parameters (logits, or mean and log standard deviation side by
side)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.agents.interface import Action, OneReplica
from murmurate.losses.divergence import categorical_kl, gaussian_kl
from murmurate.losses.policy import categorical_log_prob_and_entropy, gaussian_entropy, gaussian_log_prob
from murmurate.losses.returns import generalized_advantages
from murmurate.nets.actor_critic import ActorCritic
from murmurate.nets.mlp import layer_widths
from murmurate.nets.own_network import PolicyValueNet, policy_value_net, refuse_low_precision
from murmurate.nets.torso import in_evaluation_mode
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec, Trajectory, derive_generator


def make_net(config: Any, context: Context) -> PolicyValueNet:
    """The net of policy and values that a resolved ``config`` describes, on the context's device.

    Raises ValueError as ``policy_value_net``, and for a whole net of the user's own in bfloat16.
    """
    refuse_low_precision(config.network, config.precision)
    return policy_value_net(
        context.spec,
        network=config.network,
        torso=config.torso,
        hidden=layer_widths(config.hidden),
        recurrent=config.recurrent,
        normalize=config.normalize_observations,
        generator=derive_generator(context.seed, "network"),
    ).to(context.device)


class ActsByNet(OneReplica):
    """Methods of an ``Agent`` whose replica is the net of policy and values by which it acts.

    records_values: whether ``recorded`` needs the values. Otherwise only greedy actions, which are exported,
    have them among their outputs.
    """

    records_values: ClassVar[bool] = False
    net: PolicyValueNet
    spec: EnvSpec

    def initial_memory(self, batch: int) -> Tensor | None:
        return self.net.initial_memory(batch)

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        value: Tensor | None = None
        if memory is None and not (greedy or self.records_values) and isinstance(self.net, ActorCritic):
            policy = self.net.policy(observation)
        else:
            policy, value, memory = one_step(self.net, observation, memory, first)
        action = draw(policy, self.spec, generator, greedy)
        behaviour = self.recorded(policy, action, value, memory)
        outputs = policy_outputs(policy, self.spec, value)
        return Action(action, memory, behaviour=behaviour, outputs=outputs)

    def recorded(
        self, policy: Tensor, action: Tensor, value: Tensor | None, memory: Tensor | None
    ) -> dict[str, Tensor]:
        """``Action.behaviour`` of these actions. memory: the recurrent state afterwards."""
        return {}


def one_step(
    net: PolicyValueNet, observation: Tensor, memory: Tensor | None, first: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The policy's parameters [B, A], values [B] and the memory afterwards, for observations [B, ...].

    memory: the recurrent state before; None if the net is not recurrent. first: [B], whether an observation
    begins an episode, for which the state is reset.
    """
    if memory is None:
        policy, value = net(observation)
        return policy, value, None
    policy, value, memory = net.unroll(observation[None], memory, first[None])
    return policy[0], value[0], memory


def draw(policy: Tensor, spec: EnvSpec, generator: torch.Generator, greedy: bool) -> Tensor:
    """Actions [B] or [B, *shape] for the parameters ``policy`` [B, A]; greedy: the most likely actions."""
    if spec.categorical:
        if not greedy:
            # Gumbel-max: argmax of logits + Gumbel noise is a draw from softmax(logits)
            policy = policy - torch.empty_like(policy).exponential_(generator=generator).log()
        if spec.actions:
            return policy.argmax(-1)
        return torch.stack([logits.argmax(-1) for logits in _split(policy, spec)], -1).float()
    mean, log_std = policy.chunk(2, -1)
    if not greedy:
        mean = mean + torch.empty_like(mean).normal_(generator=generator) * log_std.exp()
    return mean.view(-1, *spec.action_shape)


def policy_outputs(policy: Tensor, spec: EnvSpec, value: Tensor | None = None) -> dict[str, Tensor]:
    """The parameters ``policy`` [B, A], and values [B], by name."""
    values = {"value": value} if value is not None else {}
    if spec.categorical:
        return {"logits": policy, **values}
    mean, log_std = policy.chunk(2, -1)
    return {"mean": mean, "log_std": log_std, **values}


def log_probability(policy: Tensor, action: Tensor, spec: EnvSpec) -> Tensor:
    """Log-probabilities [...] of actions, for the parameters ``policy`` [..., A]."""
    if spec.factors:
        return _sum([_log_probability(*pair) for pair in _factors(policy, action, spec)])
    if spec.actions:
        return _log_probability(policy, action)
    mean, log_std = policy.chunk(2, -1)
    return gaussian_log_prob(mean, log_std, action.view_as(mean))


def _log_probability(logits: Tensor, action: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def log_prob_and_entropy(policy: Tensor, action: Tensor, spec: EnvSpec) -> tuple[Tensor, Tensor]:
    """Log-probabilities of actions, and entropies, [...] each, for the parameters ``policy`` [..., A]."""
    if spec.actions:
        return categorical_log_prob_and_entropy(policy, action)
    if spec.factors:
        terms = [categorical_log_prob_and_entropy(*pair) for pair in _factors(policy, action, spec)]
        return _sum([log_prob for log_prob, _ in terms]), _sum([entropy for _, entropy in terms])
    mean, log_std = policy.chunk(2, -1)
    return gaussian_log_prob(mean, log_std, action.view_as(mean)), gaussian_entropy(mean, log_std)


def divergence(old: Tensor, new: Tensor, spec: EnvSpec) -> Tensor:
    """KL(old || new) [...] of two policies with parameters [..., A]."""
    if spec.actions:
        return categorical_kl(old, new)
    if spec.factors:
        pairs = zip(_split(old, spec), _split(new, spec), strict=True)
        return _sum([categorical_kl(*pair) for pair in pairs])
    return gaussian_kl(*old.chunk(2, -1), *new.chunk(2, -1))


def _factors(policy: Tensor, action: Tensor, spec: EnvSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [..., n], chosen value [...]) of each factor of an action; the factors are independent."""
    return zip(_split(policy, spec), action.long().unbind(-1), strict=True)


def _split(policy: Tensor, spec: EnvSpec) -> tuple[Tensor, ...]:
    """Logits [..., n] of each factor."""
    return torch.split(policy, list(spec.factors), -1)


def _sum(addends: list[Tensor]) -> Tensor:
    return torch.stack(addends).sum(0)


def explained_variance(value: Tensor, advantage: Tensor) -> float:
    """1 - Var(G - V) / Var(G) of returns G and values V, where G - V is the advantage: 1 for a perfect
    critic, 0 for a constant one; NaN if all returns are equal."""
    variance = float((advantage + value).var())
    return 1.0 - float(advantage.var()) / variance if variance > 0.0 else math.nan


@torch.no_grad()
def bootstrap_values(
    net: PolicyValueNet, data: Trajectory, memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Values of the observations after step T [B], and of ``data.truncated_observation`` [K] (or None).

    memory: the recurrent state after step T.
    """
    ended = data.terminated[-1] | data.truncated[-1]
    _, last_value, _ = one_step(net, data.last_observation, memory, ended)
    return last_value, None if data.truncated_observation is None else final_values(net, data)


@torch.no_grad()
def final_values(net: PolicyValueNet, data: Trajectory) -> Tensor:
    """Values [K] of the final observations of truncated episodes; there must be at least one."""
    final, memory = data.truncated_observation, data.memory
    if final is None:
        raise ValueError("no step of the trajectory is truncated")
    with in_evaluation_mode(net):  # they are few, often one, of which ``BatchNorm`` has no statistics
        if memory is None:
            return one_step(net, final, None, data.first[0])[1]
        # each final observation is evaluated with the recurrent state of its episode
        values: list[Tensor] = []
        counts = data.truncated.sum(1).tolist()
        while not counts[-1]:  # the net need not run to the rollout's end
            counts.pop()
        for t, observation in enumerate(torch.split(final, counts)):
            _, _, memory = one_step(net, data.observation[t], memory, data.first[t])
            if memory is not None and len(observation):
                not_first = torch.zeros(len(observation), dtype=torch.bool, device=final.device)
                values.append(one_step(net, observation, memory[data.truncated[t]], not_first)[1])
        return torch.cat(values)


def advantages(
    data: Trajectory,
    value: Tensor,
    last_value: Tensor,
    final_value: Tensor | None,
    *,
    discount: float,
    lambda_: float,
) -> Tensor:
    """Generalized advantages [T, B] of a rollout.

    value: values of its observations [T, B]. last_value: values of the observations after step T [B].
    final_value: values of ``data.truncated_observation`` [K]; None if no step was truncated.
    """
    truncated_value = torch.zeros_like(value)
    if final_value is not None:
        truncated_value[data.truncated] = final_value
    return generalized_advantages(
        data.reward,
        value,
        data.terminated,
        data.truncated,
        last_value,
        truncated_value,
        discount=discount,
        lambda_=lambda_,
    )
