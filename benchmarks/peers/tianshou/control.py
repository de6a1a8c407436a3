"""TD3 or SAC of Tianshou on HalfCheetah, for ``murmurate bench control-throughput`` (see README.md).

``control.py td3|sac FILE`` appends the number of env steps, each with one update, to FILE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tianshou.algorithm import SAC, TD3
from tianshou.algorithm.algorithm_base import policy_within_training_step
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.exploration import GaussianNoise
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import (
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
)

_LINE_SECONDS = 0.5
HIDDEN, BATCH, START, RATE = [256, 256], 256, 1_000, 3e-4


def learner(name: str, env: gymnasium.Env[Any, Any]) -> Any:
    observed, action = env.observation_space.shape, env.action_space.shape
    torso = Net(state_shape=observed, hidden_sizes=HIDDEN)
    critics = [
        ContinuousCritic(
            preprocess_net=Net(state_shape=observed, action_shape=action, hidden_sizes=HIDDEN, concat=True)
        )
        for _ in range(2)
    ]
    adam = AdamOptimizerFactory(lr=RATE)
    common = {
        "policy_optim": adam,
        "critic": critics[0],
        "critic_optim": adam,
        "critic2": critics[1],
        "critic2_optim": adam,
    }
    if name == "td3":
        actor = ContinuousActorDeterministic(preprocess_net=torso, action_shape=action)
        policy = ContinuousDeterministicPolicy(
            actor=actor, exploration_noise=GaussianNoise(sigma=0.1), action_space=env.action_space
        )
        return TD3(policy=policy, **common)
    actor = ContinuousActorProbabilistic(
        preprocess_net=torso, action_shape=action, unbounded=True, conditioned_sigma=True
    )
    alpha = AutoAlpha(-float(np.prod(action)), 0.0, adam)
    return SAC(policy=SACPolicy(actor=actor, action_space=env.action_space), alpha=alpha, **common)


def main(name: str, path: Path) -> None:
    torch.set_num_threads(1)
    env = gymnasium.make("HalfCheetah-v5")
    algorithm = learner(name, env)
    buffer = VectorReplayBuffer(200_000, 1)
    collector = Collector(algorithm, DummyVectorEnv([lambda: env]), buffer, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=START, random=True)
    bench, written_at, steps = os.getppid(), time.monotonic(), START
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", buffering=1) as file, policy_within_training_step(algorithm.policy):
        while os.getppid() == bench:
            collector.collect(n_step=1)
            algorithm.update(buffer=buffer, sample_size=BATCH)
            steps += 1
            if time.monotonic() - written_at > _LINE_SECONDS:
                written_at = time.monotonic()
                file.write(json.dumps({"env_steps": steps}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
