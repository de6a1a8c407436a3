"""Shared by agents with an actor-critic net: single steps, and the values with which a trajectory's ends are
bootstrapped."""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.nets.actor_critic import ActorCritic
from murmurate.spec import Trajectory


def one_step(
    net: ActorCritic, observation: Tensor, memory: Tensor | None, first: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The policy's parameters [B, A], values [B] and the memory afterwards, for observations [B, ...]."""
    if memory is None:
        policy, value = net(observation)
        return policy, value, None
    policy, value, memory = net.unroll(observation[None], memory, first[None])
    return policy[0], value[0], memory


@torch.no_grad()
def bootstrap_values(
    net: ActorCritic, data: Trajectory, memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Values of the observations after step T [B], and of ``data.truncated_observation`` [K], None without.

    memory: after step T.
    """
    ended = data.terminated[-1] | data.truncated[-1]
    _, last_value, _ = one_step(net, data.last_observation, memory, ended)
    return last_value, None if data.truncated_observation is None else final_values(net, data)


@torch.no_grad()
def final_values(net: ActorCritic, data: Trajectory) -> Tensor:
    """[K] values of the final observations of truncated episodes, of which there are some."""
    final, memory = data.truncated_observation, data.memory
    if final is None:
        raise ValueError("no step of the trajectory is truncated")
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
