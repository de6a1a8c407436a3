"""IMPALA's loss written out one simulator and one step at a time (Espeholt et al. 2018, section 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.agents.impala import IMPALA
from murmurate.nets.actor_critic import ActorCritic
from murmurate.spec import Trajectory
from oracles.vtrace import vtrace


def _number(x: Tensor) -> float:
    return float(x.detach())


def impala_loss(net: ActorCritic, data: Trajectory, config: IMPALA) -> Tensor:
    """The sum over steps and simulators of -log pi A + coefficient (V - v)^2 - coefficient H, for discrete
    actions; each step's memory is found by running the net over the trajectory so far."""
    steps, simulators = data.reward.shape
    row = {(t, b): k for k, (t, b) in enumerate(data.truncated.nonzero().tolist())}
    log_pi, values, entropies = ({} for _ in range(3))
    last, cut = [0.0] * simulators, [[0.0] * simulators for _ in range(steps)]
    for b in range(simulators):
        memory = None if data.memory is None else data.memory[b : b + 1]

        def read(observation: Tensor, first: bool, memory: Tensor | None = memory):
            return net.unroll(observation[None, None], memory, torch.tensor([[first]]))

        for t in range(steps):
            logits, value, memory = read(data.observation[t, b], bool(data.first[t, b]), memory)
            probability = logits[0, 0].softmax(-1)
            log_pi[t, b] = probability[data.action[t, b]].log()
            entropies[t, b] = -(probability * probability.log()).sum()
            values[t, b] = value[0, 0]
            if data.truncated[t, b] and data.truncated_observation is not None:
                cut[t][b] = _number(read(data.truncated_observation[row[t, b]], False, memory)[1])
        last[b] = _number(read(data.last_observation[b], False, memory)[1])
    grid = [[(t, b) for b in range(simulators)] for t in range(steps)]
    behaviour = data.behaviour["log_probability"]
    rho = [[_number((log_pi[at] - behaviour[at]).exp()) for at in line] for line in grid]
    v = [[_number(values[at]) for at in line] for line in grid]
    ends = (data.terminated.tolist(), data.truncated.tolist(), last, cut)
    targets, advantages = vtrace(
        rho,
        data.reward.tolist(),
        v,
        *ends,
        config.discount,
        lambda_=config.trace_lambda,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
        policy_rho_bar=config.policy_rho_bar,
    )
    total = torch.zeros(())
    for t in range(steps):
        for b in range(simulators):
            total = total - log_pi[t, b] * advantages[t][b]
            total = total + config.value_coefficient * (values[t, b] - targets[t][b]) ** 2
            total = total - config.entropy_coefficient * entropies[t, b]
    return total
