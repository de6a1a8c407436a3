"""A2C's loss written out one simulator and one step at a time (GALA eq. 1, 2 and 4)."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from murmurate.agents.a2c import A2C
from murmurate.nets.actor_critic import ActorCritic
from murmurate.spec import Trajectory


def a2c_loss(net: ActorCritic, data: Trajectory, config: A2C) -> Tensor:
    steps, simulators = data.reward.shape
    cut = {}
    for row, (t, b) in enumerate(data.truncated.nonzero().tolist()):
        cut[t, b] = row
    policy_terms, value_terms, entropies, every = [], [], [], []
    for b in range(simulators):
        with torch.no_grad():
            v = [float(net(data.observation[t, b][None])[1]) for t in range(steps)]
            after = float(net(data.last_observation[b][None])[1])
        advantage_next, value_next = 0.0, after
        advantages = [0.0] * steps
        for t in reversed(range(steps)):
            r = float(data.reward[t, b])
            if data.terminated[t, b]:
                delta, carry = r - v[t], 0.0
            elif data.truncated[t, b]:
                assert data.truncated_observation is not None
                with torch.no_grad():
                    end = float(net(data.truncated_observation[cut[t, b]][None])[1])
                delta, carry = r + config.discount * end - v[t], 0.0
            else:
                delta, carry = r + config.discount * value_next - v[t], advantage_next
            advantages[t] = delta + config.discount * config.gae_lambda * carry
            advantage_next, value_next = advantages[t], v[t]
        for t in range(steps):
            logits, value = net(data.observation[t, b][None])
            probability = logits[0].softmax(-1)
            policy_terms.append(-probability[data.action[t, b]].log())
            every.append(advantages[t])
            value_terms.append((advantages[t] + v[t] - value[0]) ** 2)
            entropies.append(-(probability * probability.log()).sum())
    count = steps * simulators
    if config.normalize_advantages:
        every = [(a - statistics.fmean(every)) / statistics.stdev(every) for a in every]
    return (
        sum(term * a for term, a in zip(policy_terms, every, strict=True)) / count
        + config.value_coefficient * sum(value_terms) / count
        - config.entropy_coefficient * sum(entropies) / count
    )
