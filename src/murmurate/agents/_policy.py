"""Shared by agents with an actor-critic net: drawing actions, their log-probabilities, and the values with
which a trajectory's ends are bootstrapped."""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.losses.policy import (
    categorical_log_prob_and_entropy,
    gaussian_entropy,
    gaussian_log_prob,
)
from murmurate.nets.actor_critic import ActorCritic
from murmurate.spec import EnvSpec, Trajectory


def one_step(
    net: ActorCritic, observation: Tensor, memory: Tensor | None, first: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The policy's parameters [B, A], values [B] and the memory afterwards, for observations [B, ...]."""
    if memory is None:
        policy, value = net(observation)
        return policy, value, None
    policy, value, memory = net.unroll(observation[None], memory, first[None])
    return policy[0], value[0], memory


def draw(policy: Tensor, spec: EnvSpec, generator: torch.Generator, greedy: bool) -> Tensor:
    """Actions [B] or [B, D] from the policy's parameters [B, A]; the most probable ones if ``greedy``."""
    if spec.actions:
        if greedy:
            return policy.argmax(-1)
        # Gumbel-max: argmax of logits + Gumbel noise is a draw from softmax(logits)
        noise = torch.empty_like(policy).exponential_(generator=generator)
        return (policy - noise.log()).argmax(-1)
    mean, log_std = policy.chunk(2, -1)
    if greedy:
        return mean
    noise = torch.empty_like(mean).normal_(generator=generator)
    return mean + noise * log_std.exp()


def log_prob_and_entropy(policy: Tensor, action: Tensor, spec: EnvSpec) -> tuple[Tensor, Tensor]:
    """log pi(a) and the entropy, both [...], from the policy's parameters [..., A]."""
    if spec.actions:
        return categorical_log_prob_and_entropy(policy, action)
    mean, log_std = policy.chunk(2, -1)
    return gaussian_log_prob(mean, log_std, action), gaussian_entropy(mean, log_std)


@torch.no_grad()
def bootstrap_values(
    net: ActorCritic, data: Trajectory, memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Values of the observations after step T [B], and [T, B] of the final observations of truncated
    episodes (None without any). memory: after step T."""
    ended = data.terminated[-1] | data.truncated[-1]
    _, last_value, _ = one_step(net, data.last_observation, memory, ended)
    if data.truncated_observation is None:
        return last_value, None
    truncated_value = torch.zeros_like(data.reward)
    truncated_value[data.truncated] = _final_values(net, data, data.truncated_observation)
    return last_value, truncated_value


def _final_values(net: ActorCritic, data: Trajectory, final: Tensor) -> Tensor:
    """[K] values of the final observations [K, ...], in row-major order."""
    memory = data.memory
    if memory is None:
        return one_step(net, final, None, data.first[0])[1]
    # each is read with the recurrent state of its episode at that step
    values: list[Tensor] = []
    for t, observation in enumerate(torch.split(final, data.truncated.sum(1).tolist())):
        _, _, memory = one_step(net, data.observation[t], memory, data.first[t])
        if memory is not None and len(observation):
            never = torch.zeros(len(observation), dtype=torch.bool, device=final.device)
            values.append(one_step(net, observation, memory[data.truncated[t]], never)[1])
    return torch.cat(values)
