"""A whole run of Stable-Baselines3.

``python -m murmurate.bench._sb3_learning td3|sac ID ENV_STEPS SEED FILE`` trains with the settings of our
recipes ``<world>-td3`` and ``<world>-sac``: two layers of 256 units, Adam at 3e-4, batches of 256, an update
per env step after random env steps. FILE gets the mean return of ten greedy evaluation games.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gymnasium
import torch

EVALUATION_GAMES = 10
RANDOM_ENV_STEPS = {"td3": 25_000, "sac": 10_000}


def main(algorithm: str, env_id: str, env_steps: int, seed: int, file: Path) -> None:
    torch.set_num_threads(1)
    import numpy as np
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise

    env = gymnasium.make(env_id)
    shape = env.action_space.shape
    assert shape is not None
    noise = NormalActionNoise(np.zeros(shape), np.full(shape, 0.1)) if algorithm == "td3" else None
    learner = {"td3": TD3, "sac": SAC}[algorithm](
        "MlpPolicy",
        env,
        buffer_size=min(env_steps, 1_000_000),
        batch_size=256,
        learning_starts=min(RANDOM_ENV_STEPS[algorithm], env_steps // 10),
        train_freq=1,
        gradient_steps=1,
        learning_rate=3e-4,
        policy_kwargs={"net_arch": [256, 256]},
        action_noise=noise,
        seed=seed,
        device="cpu",
    )
    learner.learn(env_steps)
    mean, _ = evaluate_policy(learner, gymnasium.make(env_id), n_eval_episodes=EVALUATION_GAMES)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"eval_return_mean": mean, "env_steps": env_steps}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
