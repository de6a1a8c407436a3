"""PPO's loss of a rollout written out one simulator and one step at a time (Schulman et al. 2017, eq. 9)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from murmurate.agents.ppo import PPO
from murmurate.nets.actor_critic import ActorCritic
from murmurate.spec import Trajectory


def advantages(net: ActorCritic, data: Trajectory, config: PPO) -> list[list[float]]:
    """A_hat_t = delta_t + (gamma lambda) delta_{t+1} + ... (eq. 11, 12), for each simulator."""
    steps, simulators = data.reward.shape
    cut = {(t, b): row for row, (t, b) in enumerate(data.truncated.nonzero().tolist())}
    v = data.behaviour["value"].tolist()
    found = []
    for b in range(simulators):
        with torch.no_grad():
            following = float(net(data.last_observation[b][None])[1])
        a_hat, advantage = [0.0] * steps, 0.0
        for t in reversed(range(steps)):
            if data.terminated[t, b]:
                following, advantage = 0.0, 0.0
            elif data.truncated[t, b]:
                assert data.truncated_observation is not None
                with torch.no_grad():
                    following = float(net(data.truncated_observation[cut[t, b]][None])[1])
                advantage = 0.0
            delta = float(data.reward[t, b]) + config.discount * following - v[t][b]
            advantage = delta + config.discount * config.gae_lambda * advantage
            a_hat[t], following = advantage, v[t][b]
        found.append(a_hat)
    return found


def ppo_loss(net: ActorCritic, data: Trajectory, config: PPO) -> Tensor:
    steps, simulators = data.reward.shape
    a_hat = advantages(net, data, config)
    every = [a for row in a_hat for a in row]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in every) / (len(every) - 1))
    total = torch.zeros(())
    for b in range(simulators):
        for t in range(steps):
            policy, value = net(data.observation[t, b][None])
            v = value[0].item()
            old_value = float(data.behaviour["value"][t, b])
            target = a_hat[b][t] + old_value
            pi = policy[0].softmax(-1)
            r = pi[data.action[t, b]] / math.exp(float(data.behaviour["log_probability"][t, b]))
            a = (a_hat[b][t] - mean) / deviation if config.normalize_advantages else a_hat[b][t]
            clipped = min(max(r.item(), 1 - config.ratio_clip), 1 + config.ratio_clip) * a
            l_clip = r * a if r.item() * a <= clipped else torch.tensor(clipped)
            error = (value[0] - target) ** 2
            if abs(v - old_value) > config.value_clip:
                side = math.copysign(config.value_clip, v - old_value)
                error = torch.maximum(error, torch.tensor((old_value + side - target) ** 2))
            entropy = -(pi * pi.log()).sum()
            total = total - l_clip + config.value_coefficient * error - config.entropy_coefficient * entropy
    return total / (steps * simulators)
